#!/bin/sh
# Builds the image, runs docker-compose.yml with real containers, and tries it out: streams, kills, restarts, volumes, health,
# stops. Prints a table and ends with 1 if something in it is wrong. Removes what it made. Needs `make install` first.
#
#   scripts/compose_check.sh [options of python -m benchmarks.cluster.compose_check]
#
# ENGINE: docker (the default if its engine answers) or podman (needs root; on Debian: podman buildah runc netavark
#   aardvark-dns catatonit iptables debootstrap). With podman, the Dockerfile's base image is made by debootstrap if no
#   registry has it, and podman-compose is installed from PyPI.
# BUILD, PIP_ARGS: arguments of the image. PIP_ARGS goes to pip inside the build only.
# BUILD_VOLUMES: folders that the build sees, for podman: "/srv/wheels:/wheels:ro /etc/ssl/certs:/etc/ssl/certs:ro".
# GRPC_PORT, HTTP_PORT, METRICS_PORT: ports of the host (50051, 8000, 9090).
# DEBIAN_MIRROR: for debootstrap (http://deb.debian.org/debian).
# WORK: a folder that keeps podman's images for the next run, which then only rebuilds; by default a temporary one.
# STORAGE_DRIVER: podman's, overlay or vfs; by default overlay if the folder's file system can carry it.
# PYTHON: the interpreter with Octavo's packages (.venv/bin/python).
set -eu
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-.venv/bin/python}
PROJECT=octavo-check
BUILD=${BUILD:-cpu}
PIP_ARGS=${PIP_ARGS:-}
BUILD_VOLUMES=${BUILD_VOLUMES:-}
DEBIAN_MIRROR=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
export BUILD PIP_ARGS

say() { printf 'octavo: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }
# Runs a command whose output matters only if it fails.
quietly() { "$@" >"$DIRECTORY/log" 2>&1 || { tail -n 40 "$DIRECTORY/log" >&2; fail "failed: $*"; }; }

"$PYTHON" -c 'import octavo, httpx' 2>/dev/null || fail "$PYTHON has no Octavo: run 'make install', or name another one in PYTHON"
if [ -z "${ENGINE:-}" ]; then
    if docker info >/dev/null 2>&1; then ENGINE=docker; else ENGINE=podman; fi
fi
case $ENGINE in
    docker | podman) command -v "$ENGINE" >/dev/null || fail "ENGINE is $ENGINE, which is not installed" ;;
    *) fail "ENGINE is '$ENGINE': docker or podman would work" ;;
esac

DIRECTORY=${WORK:-$(mktemp -d)}
mkdir -p "$DIRECTORY"
DIRECTORY=$(cd "$DIRECTORY" && pwd)

clean_up() {
    if [ "$ENGINE" = podman ] && [ -f "$DIRECTORY/containers.conf" ]; then
        podman rm --all --force --time 5 >/dev/null 2>&1 || true
        podman volume prune --force >/dev/null 2>&1 || true
        podman network prune --force >/dev/null 2>&1 || true
        # The storage folder itself is mounted when the driver is overlay.
        umount "$DIRECTORY/storage/$STORAGE_DRIVER" 2>/dev/null || true
    fi
    if [ -z "${WORK:-}" ]; then rm -rf "$DIRECTORY"; fi
}
trap clean_up EXIT
trap 'exit 130' INT TERM

# --- podman: storage and settings of its own, so that nobody's images and containers are touched

if [ "$ENGINE" = podman ]; then
    [ "$(id -u)" = 0 ] || fail "podman's part needs root"
    for tool in runc catatonit iptables debootstrap; do
        command -v $tool >/dev/null || fail "$tool is missing; on Debian: apt-get install podman buildah runc netavark aardvark-dns catatonit iptables debootstrap"
    done
    if [ -z "${STORAGE_DRIVER:-}" ]; then
        # Mounts an overlay as podman would; vfs copies the whole image for each container instead.
        mkdir -p "$DIRECTORY/try/lower" "$DIRECTORY/try/upper" "$DIRECTORY/try/work" "$DIRECTORY/try/merged"
        STORAGE_DRIVER=vfs
        if mount -t overlay -o "lowerdir=$DIRECTORY/try/lower,upperdir=$DIRECTORY/try/upper,workdir=$DIRECTORY/try/work" \
            octavo-try "$DIRECTORY/try/merged" 2>/dev/null; then
            umount "$DIRECTORY/try/merged"
            STORAGE_DRIVER=overlay
        fi
        rm -rf "$DIRECTORY/try"
    fi
    # runc and cgroupfs work without systemd and with cgroups of either version; limits above the host's own are refused;
    # the default log driver is systemd's.
    cat >"$DIRECTORY/containers.conf" <<EOF
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
log_driver = "k8s-file"
[network]
network_config_dir = "$DIRECTORY/networks"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
lock_type = "file"
tmp_dir = "$DIRECTORY/run/libpod"
EOF
    cat >"$DIRECTORY/storage.conf" <<EOF
[storage]
driver = "$STORAGE_DRIVER"
graphroot = "$DIRECTORY/storage"
runroot = "$DIRECTORY/run/storage"
EOF
    export CONTAINERS_CONF="$DIRECTORY/containers.conf" CONTAINERS_STORAGE_CONF="$DIRECTORY/storage.conf"

    BASE=$(sed -n 's/^FROM \(python:[^ ]*\).*/\1/p' Dockerfile)
    if ! podman image exists "docker.io/library/$BASE" && ! timeout 60 podman pull --quiet "docker.io/library/$BASE" >/dev/null 2>&1; then
        SUITE=${BASE##*-}
        say "no registry gives $BASE: making it by debootstrap ($SUITE)"
        # A run that was killed leaves half of it.
        umount "$DIRECTORY/base/proc" 2>/dev/null || true
        rm -rf "$DIRECTORY/base"
        quietly debootstrap --variant=minbase \
            --include=python3,python3-venv,python3-pip,python-is-python3,ca-certificates "$SUITE" "$DIRECTORY/base" "$DEBIAN_MIRROR"
        # Debian's mark keeps pip from installing outside of virtual environments; the image it stands for has none.
        rm -f "$DIRECTORY"/base/usr/lib/python3*/EXTERNALLY-MANAGED
        tar -C "$DIRECTORY/base" -cf "$DIRECTORY/base.tar" .
        quietly podman import "$DIRECTORY/base.tar" "docker.io/library/$BASE"
        rm -rf "$DIRECTORY/base" "$DIRECTORY/base.tar"
    fi

    [ -x "$DIRECTORY/venv/bin/podman-compose" ] || {
        "$PYTHON" -m venv "$DIRECTORY/venv"
        quietly "$DIRECTORY/venv/bin/pip" install podman-compose==1.6.0
    }
    # A pod would put all services into one network namespace.
    COMPOSE="$DIRECTORY/venv/bin/podman-compose --in-pod false"
else
    COMPOSE="docker compose"
fi

# --- The image

say "building the image with $ENGINE"
began=$(date +%s)
if [ "$ENGINE" = podman ]; then
    # One layer a stage: vfs would copy the whole image for each of its lines.
    arguments="--layers=false --pull=never"
    for volume in $BUILD_VOLUMES; do arguments="$arguments --volume=$volume"; done
    # shellcheck disable=SC2086 # Several words.
    quietly podman build $arguments --build-arg "BUILD=$BUILD" --build-arg "PIP_ARGS=$PIP_ARGS" --tag octavo:0.1.0 .
else
    quietly docker compose build router
fi
took=$(($(date +%s) - began))
size=$(($("$ENGINE" image inspect --format '{{.Size}}' octavo:0.1.0) / 1000000))

# --- The cluster

"$PYTHON" -m benchmarks.cluster.compose_check --engine "$ENGINE" --compose "$COMPOSE" --project "$PROJECT" \
    --fact "build of the image, $BUILD=$took s" --fact "size of the image=$size MB" "$@"
