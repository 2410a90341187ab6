"""The files of a running cluster in its runtime directory: a lock and the resolved options."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from configs.load import ENV_PREFIX
from configs.options import Options
from octavo.cluster.errors import ClusterError
from runtime.process import private_directory
from runtime.telemetry.quarantine import FILE_NAME


@contextmanager
def locked_runtime_dir(path: Path) -> Iterator[Path]:
    """Reserves the directory for this cluster until the block or the process ends. Raises ClusterError."""
    try:
        directory = private_directory(path)
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        reason = f"runtime_dir={str(path)!r}: {error.strerror}" if error.strerror else str(error)
        raise ClusterError(reason) from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(lock, 32, 0).decode().strip()
            raise ClusterError(
                f"runtime_dir={str(path)!r} is in use by another `octavo up` (pid {pid}): stop that one, or give this "
                f"one its own with --runtime-dir, --port and --metrics-port"
            ) from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        yield directory
    finally:
        os.close(lock)


def write_options(options: Options, directory: Path) -> Path:
    """Writes the resolved options to a file that all processes of the cluster read. Only its owner can read it. What an
    earlier cluster has left is removed."""
    (directory / FILE_NAME).unlink(missing_ok=True)
    path = directory / "options.yaml"
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        yaml.safe_dump(options.as_file(), file, sort_keys=False)
    return path


def child_environment() -> dict[str, str]:
    """This process's environment without options: the file has them, with flags applied.

    numpy's BLAS, which nothing here calls, would start a thread per core in each process.
    """
    options = {f"{ENV_PREFIX}{name.upper()}" for name in Options.model_fields} | {"OCTAVO_CONFIG"}
    kept = {name: value for name, value in os.environ.items() if name not in options}
    return {"OPENBLAS_NUM_THREADS": "1"} | kept
