"""The directories that keep things between starts, and the room on their disks."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kernels.native.cache_directory import CacheDirectoryError, cache_directory
from octavo.doctor.machine import Check, Machine, gib, note, ok, problem
from runtime.process import cache_directory as tokenizer_cache

# Kernels take 0.2 MB, a tokenizer a few MB while it is converted, logs and sockets little.
_LEAST = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A directory's disk. files: that can still be made."""

    free: int
    files: int


def check_caches(machine: Machine) -> Iterator[Check]:
    """Measures each cache, and looks if its directory can be used."""
    found: list[str] = []
    for name in ("kernels", "weights"):
        try:
            found.append(f"{name} {gib(size_of(cache_directory(name)))}")
        except CacheDirectoryError as error:
            yield problem("caches", str(error), "set OCTAVO_CACHE_DIR to a directory of yours that can be written")
            return
    home = tokenizer_cache()
    others = {"tokenizers": home / "tokenizers", "Triton": _triton_cache(), "hub": _hub_cache()}
    found += [f"{name} {gib(size_of(path))}" for name, path in others.items() if path.is_dir()]
    yield ok("caches", f"{', '.join(found)} (in {home})")


def check_disk(machine: Machine) -> Iterator[Check]:
    """Compares free space with what a start writes."""
    model = machine.readings["model"].model
    packed = 0
    if not machine.on_gpu and model and machine.options.weight_cache * 2**30 >= model.weight_bytes:
        packed = model.weight_bytes
    places = {"caches": existing(tokenizer_cache()), "runtime_dir": existing(machine.options.runtime_dir)}
    rooms = {name: (path, room_of(path)) for name, path in places.items()}
    for name, (path, room) in rooms.items():
        if room.free < _LEAST or not room.files:
            what = f"{gib(room.free)} free" if room.files else "no file can be made (no inodes are left)"
            advice = (
                "free some space, or set OCTAVO_CACHE_DIR"
                if name == "caches"
                else "free some space, or set runtime_dir"
            )
            yield problem(
                "disk", f"{name}: {path} has {what}; a start needs {gib(_LEAST)}", f"{advice} to another disk"
            )
            return
    path, room = rooms["caches"]
    # The cache of weights keeps half of the disk's free space.
    if packed and room.free < 2 * packed and not list((tokenizer_cache() / "weights").glob("*.safetensors")):
        found = f"{path} has {gib(room.free)} free; packed weights of {gib(packed)} are kept if twice as much is"
        yield note("disk", found, "free some space, or set OCTAVO_CACHE_DIR: else each start packs the weights again")
        return
    yield ok("disk", ", ".join(f"{gib(room.free)} free for {name}" for name, (_, room) in rooms.items()))


def existing(path: Path) -> Path:
    """Returns the path, or the closest directory above it that exists."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())


def room_of(path: Path) -> Room:
    found = os.statvfs(path)
    # File systems without inodes of a fixed number say 0 of 0.
    return Room(free=found.f_bavail * found.f_frsize, files=found.f_favail if found.f_files else 2**31)


def size_of(path: Path) -> int:
    """Bytes of all files below; links are not followed."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except FileNotFoundError:  # another process has deleted it since
                continue
    return total


def _triton_cache() -> Path:
    given = os.environ.get("TRITON_CACHE_DIR")
    return Path(given) if given else Path.home() / ".triton" / "cache"


def _hub_cache() -> Path:
    from huggingface_hub import constants  # slow to import

    return Path(constants.HF_HUB_CACHE)
