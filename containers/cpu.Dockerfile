# LayerZero on a CPU: torch without CUDA, and tokenizers.
#
#   make wheel && docker build --file containers/cpu.Dockerfile --tag layerzero:cpu .
FROM debian:trixie-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
SHELL ["/bin/sh", "-eu", "-c"]
COPY containers/install.sh containers/cpu.txt dist/*.whl /tmp/layerzero/
RUN /tmp/layerzero/install.sh /tmp/layerzero cpu && rm -rf /tmp/layerzero

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
