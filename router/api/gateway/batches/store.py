"""The directory of files and batches, which routers may share: a folder a tenant, and the queue of batches that run.

    TENANT/files/FILE.data, FILE.json       a file's content and what is told about it
    TENANT/batches/BATCH/                   a batch: record.json, its input, and its output until it has ended
    queue/TENANT.BATCH                      a batch that has not ended; the router process that runs it holds its lock

Every file appears whole, by a rename.
"""

import asyncio
import hashlib
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from router.api.gateway.responses.store import StoreError
from router.batches.journal import sync_directory

T = TypeVar("T")
# Each file counts as whole blocks, as in a file system: so there are not too many small ones, either.
_BLOCK = 4096
_UNFINISHED, _UNFINISHED_S = ".part-", 3600.0
_QUEUE = "queue"
_FILE_ID = re.compile(r"file-[0-9a-f]{32}")
_BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")


class StoredFile(msgspec.Struct, frozen=True):
    """What is told about a file. bytes: its size."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str


class BatchStore:
    """The directory. Its methods are for threads, but for `run`; all raise OSError unless `run` calls them."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        """max_bytes: option max_files_bytes. Raises StoreError if the directory can't be used."""
        self.max_bytes, self._directory = max_bytes, directory
        try:
            (directory / _QUEUE).mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                pass
        except OSError as error:
            raise self._failure(error) from None

    async def run(self, work: Callable[..., T], *arguments: object) -> T:
        """Calls a method in a thread. Raises StoreError."""
        try:
            return await asyncio.to_thread(work, *arguments)
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> StoreError:
        return StoreError(f"batches_dir={str(self._directory)!r}: {error.strerror or error}")

    # --- Files

    def new_part(self, tenant: str) -> Path:
        """Makes an empty file, to be filled and given to `add_file`."""
        folder = self._files(tenant)
        number, name = tempfile.mkstemp(prefix=_UNFINISHED, dir=folder)
        os.close(number)
        return Path(name)

    def add_file(self, tenant: str, file_id: str, part: Path, filename: str, purpose: str) -> StoredFile:
        """Stores a finished file; nothing if it is stored already."""
        path = self._files(tenant) / f"{file_id}.data"
        if part.exists():
            with part.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(part, path)
        told = StoredFile(file_id, path.stat().st_size, int(time.time()), filename, purpose)
        write_whole(path.with_suffix(".json"), msgspec.json.encode(told))
        return told

    def file(self, tenant: str, file_id: str) -> StoredFile | None:
        if not _FILE_ID.fullmatch(file_id):
            return None
        try:
            return msgspec.json.decode(self.content(tenant, file_id).with_suffix(".json").read_bytes(), type=StoredFile)
        except FileNotFoundError:
            return None

    def files(self, tenant: str) -> list[StoredFile]:
        """All of a tenant's files, the newest first."""
        found = [self.file(tenant, path.stem) for path in self._files(tenant).glob("*.json")]
        told = [each for each in found if each is not None]
        return sorted(told, key=lambda each: (each.created_at, each.id), reverse=True)

    def num_files(self, tenant: str) -> int:
        return sum(name.endswith(".json") for name in os.listdir(self._files(tenant)))

    def content(self, tenant: str, file_id: str) -> Path:
        return self._files(tenant) / f"{file_id}.data"

    def delete_file(self, tenant: str, file_id: str) -> bool:
        """Returns False if there was none. A batch that computes it goes on."""
        if self.file(tenant, file_id) is None:
            return False
        path = self.content(tenant, file_id)
        path.with_suffix(".json").unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        return True

    def _files(self, tenant: str) -> Path:
        folder = self._directory / folder_of(tenant) / "files"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder

    # --- Room

    def why_full(self, tenant: str, weight: float, num_bytes: int) -> str:
        """Tells why a tenant may not store so many bytes more; empty: it may. Removes what killed uploads left."""
        used: dict[str, int] = {}
        for folder, size in self._sizes():
            used[folder] = used.get(folder, 0) + size
        total, own = sum(used.values()), used.get(folder_of(tenant), 0)
        free = self.max_bytes - total
        # Without keys all callers are one, which may take everything.
        if num_bytes <= free and (not tenant or own + num_bytes <= weight * free):
            return ""
        share = f", {own} of them this tenant's, which may have as many as are free" if tenant else ""
        return f"max_files_bytes={self.max_bytes}: {total} bytes are stored{share}; delete files that are not needed"

    def _sizes(self) -> Iterator[tuple[str, int]]:
        """The folder and the size of each file. A file with two names counts once."""
        seen: set[int] = set()
        for root, _, names in os.walk(self._directory):
            folder = Path(root).relative_to(self._directory).parts[:1]
            for name in names:
                path = Path(root, name)
                try:
                    stat = path.lstat()
                except FileNotFoundError:
                    continue
                if name.startswith(_UNFINISHED) and time.time() - stat.st_mtime > _UNFINISHED_S:
                    path.unlink(missing_ok=True)
                elif folder and stat.st_ino not in seen:
                    seen.add(stat.st_ino)
                    yield folder[0], max(-(-stat.st_size // _BLOCK), 1) * _BLOCK

    # --- Batches

    def batch_folder(self, tenant: str, batch_id: str) -> Path | None:
        """The folder of a batch; None: an id can't be like this."""
        if not _BATCH_ID.fullmatch(batch_id):
            return None
        return self._directory / folder_of(tenant) / "batches" / batch_id

    def batch_folders(self, tenant: str) -> list[Path]:
        return [*(self._directory / folder_of(tenant) / "batches").glob("batch_*")]

    def enqueue(self, folder: Path) -> None:
        """Lets a router process run the batch of this folder."""
        (self._directory / _QUEUE / f"{folder.parent.parent.name}.{folder.name}").touch(mode=0o600)
        sync_directory(self._directory / _QUEUE)

    def queue(self) -> list[tuple[Path, Path]]:
        """The batches that have not ended, the oldest first: the entry in the queue, and the folder."""
        with os.scandir(self._directory / _QUEUE) as entries:
            found = []
            for entry in entries:
                tenant, _, batch_id = entry.name.partition(".")
                try:
                    found.append((entry.stat().st_mtime, Path(entry.path), tenant, batch_id))
                except FileNotFoundError:
                    # Another router process has ended it.
                    continue
        return [(path, self._directory / tenant / "batches" / batch_id) for _, path, tenant, batch_id in sorted(found)]


def folder_of(tenant: str) -> str:
    """A tenant's name may not be one for a folder."""
    return hashlib.sha256(tenant.encode()).hexdigest()[:32]


def new_id(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex}"


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file beside its name, then gives it the name."""
    number, name = tempfile.mkstemp(prefix=_UNFINISHED, dir=path.parent)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
        sync_directory(path.parent)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def remove_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
