# Targets: serve (CUDA 13), serve-sm120 (adds b12x), serve-cpu (no GPU), bench (the harness alone).
#
# `make image TARGET=…` builds from a clean tree and checks the result against locks/; plain `docker build` does not.
# Everything that is installed comes from locks/<target>.txt with its SHA-256; the base is pinned by digest.
# Optional build secrets: `ca` (a CA bundle for the package index) and `pip` (a pip.conf). Optional wheels: wheels/.
# hadolint global ignore=DL3008
# (Debian's packages follow the base image's own archive; the SBOM in the image records what was installed.)
ARG BASE=python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b

# This project's own wheel.
FROM ${BASE} AS wheel
WORKDIR /src
ARG PIP_NO_INDEX=
COPY locks/build.txt locks/
RUN --mount=type=secret,id=ca --mount=type=secret,id=pip,target=/etc/pip.conf \
    --mount=type=bind,source=wheels,target=/wheels \
    if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi; \
    python3 -m venv /build && /build/bin/python -m pip install --no-cache-dir --no-deps --require-hashes \
        --find-links /wheels -r locks/build.txt
COPY pyproject.toml README.md LICENSE ./
COPY kimi_k3_serve kimi_k3_serve
COPY harness harness
ENV SOURCE_DATE_EPOCH=315532800
RUN /build/bin/python -m pip wheel --no-cache-dir --no-deps --no-index --no-build-isolation -w /dist .

# A target's locked wheels, then ours.
FROM ${BASE} AS install
ARG TARGET
ARG PIP_NO_INDEX=
COPY locks/${TARGET}.txt /locks/
RUN --mount=type=secret,id=ca --mount=type=secret,id=pip,target=/etc/pip.conf \
    --mount=type=bind,source=wheels,target=/wheels \
    if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi; \
    python3 -m venv --without-pip /opt/kimi-k3 && python3 -m venv /build && \
    /build/bin/python -m pip --python /opt/kimi-k3/bin/python install --no-cache-dir --no-deps \
        --require-hashes --only-binary :all: --find-links /wheels --report /locks/installed.json \
        -r "/locks/${TARGET}.txt"
COPY --from=wheel /dist /dist
RUN /build/bin/python -m pip --python /opt/kimi-k3/bin/python install --no-cache-dir --no-deps --no-index \
        --compile /dist/*.whl
COPY locks /opt/kimi-k3/locks
ENV KIMI_K3_LOCKS=/opt/kimi-k3/locks
RUN /opt/kimi-k3/bin/python -m kimi_k3_serve sbom --target "${TARGET}" --report /locks/installed.json \
        --out /opt/kimi-k3

# What all targets share at run time: a user without a name on the host, caches in one volume, the lock's labels.
FROM ${BASE} AS runtime
RUN groupadd --gid 10001 kimi && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /cache kimi && \
    install -d -o 10001 -g 10001 /cache /cache/huggingface /results
ENV PATH=/opt/kimi-k3/bin:$PATH \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONNOUSERSITE=1 \
    HOME=/cache USER=kimi LOGNAME=kimi XDG_CACHE_HOME=/cache XDG_CONFIG_HOME=/cache/config \
    HF_HOME=/cache/huggingface VLLM_CACHE_ROOT=/cache/vllm TRITON_CACHE_DIR=/cache/triton \
    FLASHINFER_WORKSPACE_BASE=/cache MPLCONFIGDIR=/tmp/matplotlib VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
ARG TARGET
ARG LOCK_SHA256
ARG REVISION
ARG VERSION
ARG BASE
ENV KIMI_K3_TARGET=${TARGET} KIMI_K3_LOCKS=/opt/kimi-k3/locks KIMI_K3_LOCK_SHA256=${LOCK_SHA256}
LABEL org.opencontainers.image.title="kimi-k3-serve ${TARGET}" \
      org.opencontainers.image.description="Kimi-K3 on vLLM with decode context parallelism, and its measurement" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE}" \
      kimi-k3.target="${TARGET}" \
      kimi-k3.lock.sha256="${LOCK_SHA256}"
USER 10001:10001
WORKDIR /cache
ENTRYPOINT ["kimi-k3"]

FROM runtime AS serve-cpu
USER 0:0
RUN apt-get update && apt-get install -y --no-install-recommends libnuma1 && rm -rf /var/lib/apt/lists/*
USER 10001:10001
COPY --from=install /opt/kimi-k3 /opt/kimi-k3
STOPSIGNAL SIGTERM
EXPOSE 8000
HEALTHCHECK --interval=5s --timeout=60s --start-period=15m --retries=3 CMD ["kimi-k3", "health"]

# Triton compiles its launchers with a C compiler; FlashInfer and TileLang compile kernels with g++, ninja and the
# nvcc of the locked wheels. Nothing else of a toolchain is in the image. The driver comes from the host.
FROM runtime AS serve-system
USER 0:0
RUN apt-get update && apt-get install -y --no-install-recommends g++ libc6-dev libnuma1 libibverbs1 && \
    rm -rf /var/lib/apt/lists/*
USER 10001:10001
ENV CUDA_HOME=/opt/kimi-k3/lib/python3.11/site-packages/nvidia/cu13 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM serve-system AS serve
COPY --from=install /opt/kimi-k3 /opt/kimi-k3
STOPSIGNAL SIGTERM
EXPOSE 8000
HEALTHCHECK --interval=15s --timeout=120s --start-period=60m --retries=3 CMD ["kimi-k3", "health"]

FROM serve AS serve-sm120

FROM runtime AS bench
COPY --from=install /opt/kimi-k3 /opt/kimi-k3
WORKDIR /results
ENTRYPOINT ["python3", "-m", "harness"]
