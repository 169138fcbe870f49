# llmpq in a container.
#   docker build -t llmpq .                                       CPUs
#   docker build -t llmpq:cuda --target cuda .                    NVIDIA GPUs
#   docker run --rm llmpq doctor
#   docker run --rm --gpus all --ipc host -p 8000:8000 -v "$HOME/.cache/huggingface:/models" \
#     llmpq:cuda serve Qwen/Qwen3-0.6B --host 0.0.0.0

FROM python:3.12-slim-bookworm AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY llmpq llmpq
COPY clusters clusters
COPY kernels kernels
COPY planner planner
COPY profiler profiler
COPY runtime runtime
RUN python -m pip wheel --no-cache-dir --no-deps -w /wheels .

FROM python:3.12-slim-bookworm AS base
# A compiler: kernels for this CPU, and Triton's launchers, are built where they run.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
COPY constraints.txt /tmp/constraints.txt
COPY --from=wheel /wheels /wheels
RUN useradd --create-home llmpq && mkdir /models && chown llmpq /models
ENV HF_HOME=/models PYTHONUNBUFFERED=1
WORKDIR /home/llmpq
ENTRYPOINT ["llmpq-dist"]
CMD ["doctor"]

FROM base AS cuda
ARG TORCH_INDEX=https://pypi.org/simple
RUN python -m pip install --no-cache-dir -c /tmp/constraints.txt --index-url "$TORCH_INDEX" \
        --extra-index-url https://pypi.org/simple torch \
    && python -m pip install --no-cache-dir -c /tmp/constraints.txt --find-links /wheels \
        "llmpq[run,serve,gpu]"
USER llmpq

FROM base AS cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN python -m pip install --no-cache-dir -c /tmp/constraints.txt --index-url "$TORCH_INDEX" \
        --extra-index-url https://pypi.org/simple torch \
    && python -m pip install --no-cache-dir -c /tmp/constraints.txt --find-links /wheels \
        "llmpq[run,serve]"
USER llmpq
