# LayerZero on AMD GPUs with ROCm 7.2. Not run on hardware: see docs/gpu.md, "Unproven backends".
# Run it with `--device /dev/kfd --device /dev/dri --group-add video --group-add render`.
#
#   make wheel && docker build --file containers/rocm.Dockerfile --tag layerzero:rocm .
FROM ubuntu:24.04
# torch for ROCm has the ROCm libraries in its wheel; the machine needs the kernel driver alone.
ARG TORCH_INDEX=https://download.pytorch.org/whl/rocm7.2
SHELL ["/bin/sh", "-eu", "-c"]
COPY containers/install.sh containers/rocm.txt dist/*.whl /tmp/layerzero/
RUN /tmp/layerzero/install.sh /tmp/layerzero rocm && rm -rf /tmp/layerzero

# The folder `layerzero` is made in each of these: measurements and compiled kernels, and what failed before.
ENV PATH="/opt/layerzero/bin:$PATH" \
    XDG_CACHE_HOME=/var/cache/layerzero \
    XDG_STATE_HOME=/var/lib/layerzero \
    TRITON_CACHE_DIR=/var/cache/layerzero/triton \
    PYTHONUNBUFFERED=1
VOLUME ["/var/cache/layerzero", "/var/lib/layerzero"]
USER 10001:10001
WORKDIR /home/layerzero
HEALTHCHECK --interval=60s --timeout=30s --start-period=60s --retries=3 CMD ["layerzero", "ready"]
ENTRYPOINT ["/opt/layerzero/bin/python"]
CMD ["-m", "layerzero", "doctor"]
