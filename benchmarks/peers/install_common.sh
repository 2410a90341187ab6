# shellcheck shell=sh
# Common code of the install scripts; each sets NAME and sources this file with its own arguments.
PYTHON=${PYTHON:-python3}
PIP_ARGS=${PIP_ARGS:-}
DIRECTORY=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/octavo/peers/$NAME}

say() { printf 'install_%s: %s\n' "$NAME" "$*" >&2; }

# Arguments: a command that succeeds once the peer is installed.
end_if_installed() {
    if "$@" >/dev/null 2>&1; then
        say "already installed in $DIRECTORY"
        exit 0
    fi
}

make_environment() {
    say "making $DIRECTORY"
    "$PYTHON" -m venv --clear "$DIRECTORY"
}

pip() { "$DIRECTORY/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
