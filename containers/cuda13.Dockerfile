# LayerZero on NVIDIA GPUs with CUDA 13: every library in it is for CUDA 13. `devel`, because FlashInfer calls nvcc.
# Run it with `--gpus all`.
#
#   make wheel && docker build --file containers/cuda13.Dockerfile --tag layerzero:cuda13 .
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04
# PyPI has this torch, built for CUDA 13.0.
ARG TORCH_INDEX=
SHELL ["/bin/sh", "-eu", "-c"]
COPY containers/install.sh containers/cuda13.txt dist/*.whl /tmp/layerzero/
RUN /tmp/layerzero/install.sh /tmp/layerzero cuda13 && rm -rf /tmp/layerzero

# The folder `layerzero` is made in each of these: measurements and compiled kernels, and what failed before.
ENV PATH="/opt/layerzero/bin:$PATH" \
    XDG_CACHE_HOME=/var/cache/layerzero \
    XDG_STATE_HOME=/var/lib/layerzero \
    TRITON_CACHE_DIR=/var/cache/layerzero/triton \
    FLASHINFER_WORKSPACE_BASE=/var/cache/layerzero \
    PYTHONUNBUFFERED=1
VOLUME ["/var/cache/layerzero", "/var/lib/layerzero"]
USER 10001:10001
WORKDIR /home/layerzero
HEALTHCHECK --interval=60s --timeout=30s --start-period=60s --retries=3 CMD ["layerzero", "ready"]
ENTRYPOINT ["/opt/layerzero/bin/python"]
CMD ["-m", "layerzero", "doctor"]
