# shellcheck shell=sh
# What the install scripts share; each sets NAME and reads this with its own arguments.
PYTHON=${PYTHON:-python3}
PIP_ARGS=${PIP_ARGS:-}
DIRECTORY=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/octavo/peers/$NAME}

say() { printf 'install_%s: %s\n' "$NAME" "$*" >&2; }

# Arguments: a command that works once the peer is there.
end_if_installed() {
    if "$@" >/dev/null 2>&1; then
        say "$DIRECTORY has it"
        exit 0
    fi
}

make_environment() {
    say "making $DIRECTORY"
    "$PYTHON" -m venv --clear "$DIRECTORY"
}

pip() { "$DIRECTORY/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
