#!/bin/sh
# Builds llama.cpp for this machine's CPU, from the source in the llama-cpp-python package.
#
#   benchmarks/peers/install_llama_cpp.sh [DIRECTORY]
#
# DIRECTORY: default octavo/peers/llama_cpp in the user's cache. PYTHON: an interpreter with pip (default: python3).
# PIP_ARGS: options for pip. Needs cmake and a C++ compiler. A second run ends at once. About 10 minutes on 2 cores.
set -eu

NAME=llama_cpp
. "$(dirname "$0")/install_common.sh"
RELEASE=0.3.36
SOURCE=$DIRECTORY/source

end_if_installed test -f "$DIRECTORY/installed"
say "making $DIRECTORY"
mkdir -p "$SOURCE"
# shellcheck disable=SC2086 # PIP_ARGS is a list of words.
"$PYTHON" -m pip --quiet --disable-pip-version-check download $PIP_ARGS \
    --no-binary :all: --no-deps --dest "$DIRECTORY" "llama-cpp-python==$RELEASE"
tar --extract --file "$DIRECTORY/llama_cpp_python-$RELEASE.tar.gz" --directory "$SOURCE" --strip-components 1
# GGML_NATIVE: this CPU's instructions. The server needs neither HTTPS nor its web page.
cmake -S "$SOURCE/vendor/llama.cpp" -B "$DIRECTORY/build" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
    -DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF \
    -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_TESTS=OFF >&2
nice cmake --build "$DIRECTORY/build" --parallel "$(nproc)" \
    --target llama-batched-bench llama-server llama-quantize >&2
mkdir -p "$DIRECTORY/bin"
for program in llama-batched-bench llama-server llama-quantize; do
    cp "$DIRECTORY/build/bin/$program" "$DIRECTORY/bin/"
done
rm -rf "$SOURCE" "$DIRECTORY/build" "$DIRECTORY/llama_cpp_python-$RELEASE.tar.gz"
touch "$DIRECTORY/installed"
say "done"
