#!/usr/bin/env bash
# Fills .first_run/ with what benchmarks/gpu/first_run.sh takes along to a GPU machine without a network:
#
#     .first_run/whl/       wheels of Octavo's dependencies that a machine with torch and transformers may lack
#     .first_run/before/    the kernels of an earlier commit, which the A/B part times beside today's
#
#     benchmarks/gpu/prepare.sh [COMMIT]     default: before rows were masked, and e4m3 read by pairs
#
# PYTHON_VERSION (3.12) is the GPU machine's. Where .git/ is not there, as on the machine itself, `before` stays as it is.
set -eu
cd "$(dirname "$0")/../.."
before="${1:-a2e760f2}"
python_version="${PYTHON_VERSION:-3.12}"

mkdir -p .first_run/whl
rm -rf .first_run/before
mkdir .first_run/before
git archive "$before" kernels | tar -x -C .first_run/before

packages=(
    annotated-types gguf googleapis-common-protos grpcio grpcio-health-checking grpcio-reflection httpcore2 httptools
    httpx2 llguidance msgspec protobuf pydantic pydantic-core pytest-asyncio python-multipart pyzmq sse-starlette
    starlette tenacity truststore typing-inspection uvicorn
)
platforms=()
for tag in manylinux_2_34 manylinux_2_31 manylinux_2_28 manylinux_2_27 manylinux_2_26 manylinux_2_24 manylinux_2_17 \
    manylinux2014 manylinux1; do
    platforms+=(--platform "${tag}_x86_64")
done
rm -f .first_run/whl/*.whl
python3 -m pip download -q --no-deps --only-binary=:all: --python-version "$python_version" --implementation cp \
    "${platforms[@]}" -d .first_run/whl -c constraints/common.txt "${packages[@]}"
du -sh .first_run/whl .first_run/before
