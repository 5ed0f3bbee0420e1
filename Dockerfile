# Images with flowalign and all rewards, as a user without root rights:
#   docker build --target cpu -t flowalign:cpu .
#   docker build --target cuda -t flowalign:cuda .
#   docker run --gpus all --ipc host -v "$PWD/runs:/flowalign/runs" flowalign:cuda demo
FROM python:3.12-slim AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY flowalign flowalign
COPY reward_models reward_models
COPY pipelines pipelines
COPY assets assets
COPY configs configs
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim AS base
RUN useradd --create-home --uid 1000 aligner \
 && mkdir -p /flowalign/runs \
 && chown -R aligner /flowalign
ENV PATH=/home/aligner/.local/bin:$PATH PYTHONUNBUFFERED=1 HF_HOME=/flowalign/huggingface
WORKDIR /flowalign
COPY --from=wheel /wheels /wheels

FROM base AS cpu
USER aligner
RUN pip install --user --no-cache-dir torch torchvision --index-url https://download.pytorch.org/whl/cpu \
 && pip install --user --no-cache-dir "$(ls /wheels/*.whl)[rewards]"
ENTRYPOINT ["flowalign"]
CMD ["--help"]

# The wheels of torch contain the CUDA libraries; the driver comes from the host.
FROM base AS cuda
USER aligner
RUN pip install --user --no-cache-dir "$(ls /wheels/*.whl)[rewards,quantized]"
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
ENTRYPOINT ["flowalign"]
CMD ["--help"]
