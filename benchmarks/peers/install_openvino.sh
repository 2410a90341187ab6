#!/bin/sh
# Makes an environment with OpenVINO GenAI, for the benchmarks that compare Octavo with it.
#
#   benchmarks/peers/install_openvino.sh [DIRECTORY]
#
# DIRECTORY: default octavo/peers/openvino in the user's cache. PYTHON: the interpreter to build on (default: python3).
# PIP_ARGS: options for pip. A second run ends at once. About a minute and 500 MB.
set -eu

NAME=openvino
. "$(dirname "$0")/install_common.sh"

end_if_installed "$DIRECTORY/bin/python" -c 'import openvino_genai'
make_environment
# shellcheck disable=SC2086 # PIP_ARGS is a list of words.
pip install $PIP_ARGS openvino-genai==2026.4.1.0 openvino-tokenizers==2026.4.1.0
"$DIRECTORY/bin/python" -c 'import openvino_genai'
say "done"
