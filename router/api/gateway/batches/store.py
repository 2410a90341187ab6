"""The directory of files and batches, which routers may share: a folder a tenant, and the queue of batches that run.

    TENANT/files/FILE.data, FILE.json       a file's content and what is told about it
    TENANT/batches/BATCH/                   a batch: record.json, its input, and its output until it has ended
    queue/TENANT.BATCH                      a batch that has not ended; the router process that runs it holds its lock

Every file appears whole, by a rename.
"""

import asyncio
import errno
import hashlib
import logging
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

log = logging.getLogger("octavo.router.batches")

T = TypeVar("T")
# Each file counts as whole blocks, as in a file system: so there are not too many small ones, either.
_BLOCK = 4096
UNFINISHED, _UNFINISHED_S = ".part-", 3600.0
# A content that nothing tells about is removed after this time: it may be in the making.
_ORPHAN_S = 600.0
# A disk with less room than this takes no batch's output.
_LEAST_FREE = 2**16
# Errors that end by themselves once the disk is there, and has room.
_TROUBLES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE})
_QUEUE, RECORD = "queue", "record.json"
_FILE_ID = re.compile(r"file-[0-9a-f]{32}")
_BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")


class StoredFile(msgspec.Struct, frozen=True):
    """The description of a file. bytes: its size."""

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
            # Stored data can be read, and deleted, when the disk is full.
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not (directory / _QUEUE).is_dir():
                raise self._failure(error) from None
            log.error("%s", self._failure(error))

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
        number, name = tempfile.mkstemp(prefix=UNFINISHED, dir=folder)
        os.close(number)
        return Path(name)

    def add_file(self, tenant: str, file_id: str, part: Path, filename: str, purpose: str) -> StoredFile:
        """Stores a finished file; nothing if it is stored already. If it fails, the part or the content is there."""
        path = self._files(tenant) / f"{file_id}.data"
        if part.exists():
            with part.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(part, path)
        told = StoredFile(file_id, path.stat().st_size, int(time.time()), filename, purpose)
        write_whole(path.with_suffix(".json"), msgspec.json.encode(told))
        return told

    def add_upload(self, tenant: str, part: Path, filename: str, purpose: str) -> StoredFile:
        """Stores a finished upload, or leaves nothing of it but the part."""
        file_id = new_id("file-")
        try:
            return self.add_file(tenant, file_id, part, filename, purpose)
        except BaseException:
            self.content(tenant, file_id).unlink(missing_ok=True)
            raise

    def file(self, tenant: str, file_id: str) -> StoredFile | None:
        if not _FILE_ID.fullmatch(file_id):
            return None
        try:
            return msgspec.json.decode(self.content(tenant, file_id).with_suffix(".json").read_bytes(), type=StoredFile)
        except FileNotFoundError:
            return None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            log.error("%s.json can't be read: %s", file_id, error)
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
                if name.startswith(UNFINISHED) and time.time() - stat.st_mtime > _UNFINISHED_S:
                    path.unlink(missing_ok=True)
                elif folder and stat.st_ino not in seen:
                    seen.add(stat.st_ino)
                    yield folder[0], max(-(-stat.st_size // _BLOCK), 1) * _BLOCK

    def check_disk(self) -> None:
        """Raises OSError if the disk can't take any output: what is computed would be lost."""
        told = os.statvfs(self._directory)
        if (free := told.f_bavail * told.f_frsize) < _LEAST_FREE:
            raise OSError(errno.ENOSPC, f"No space left on device: {free} bytes are free")

    def sweep(self) -> None:
        """Removes what processes left that were killed, or failed, in the middle: nothing tells about it."""
        for _ in self._sizes():
            pass
        for folder in self._directory.glob("*/batches/batch_*"):
            # Looked at in this order: a batch has an entry before it has a folder, and a record when the entry goes.
            if not self.entry_of(folder).exists() and not (folder / RECORD).exists():
                log.warning("%s was never finished: it is removed", folder.name)
                remove_folder(folder)
        for path in self._directory.glob("*/files/*.data"):
            if self._is_old(path) and not path.with_suffix(".json").exists() and not self._is_output(path):
                log.warning("%s was never finished: it is removed", path.name)
                path.unlink(missing_ok=True)

    def _is_old(self, path: Path) -> bool:
        try:
            return time.time() - path.lstat().st_mtime > _ORPHAN_S
        except FileNotFoundError:
            return False

    def _is_output(self, path: Path) -> bool:
        """Tells whether a content may be that of a batch which is finalizing."""
        name = path.stem.encode()
        for _, folder in self.queue():
            try:
                if folder.parent.parent == path.parent.parent and name in (folder / RECORD).read_bytes():
                    return True
            except FileNotFoundError:
                continue
        return False

    # --- Batches

    def batch_folder(self, tenant: str, batch_id: str) -> Path | None:
        """The folder of a batch; None: an id can't be like this."""
        if not _BATCH_ID.fullmatch(batch_id):
            return None
        return self._directory / folder_of(tenant) / "batches" / batch_id

    def batch_folders(self, tenant: str) -> list[Path]:
        return [*(self._directory / folder_of(tenant) / "batches").glob("batch_*")]

    def entry_of(self, folder: Path) -> Path:
        """The entry in the queue by which a router process runs the batch of this folder."""
        return self._directory / _QUEUE / f"{folder.parent.parent.name}.{folder.name}"

    def queue(self) -> list[tuple[Path, Path]]:
        """The batches that have not ended, in the order in which they came, or were put back: the entry in the queue,
        and the folder."""
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
    number, name = tempfile.mkstemp(prefix=UNFINISHED, dir=path.parent)
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


def is_of_disk(error: BaseException | None) -> bool:
    """Tells whether an error ends by itself once the disk is there, and has room."""
    while error is not None:
        if isinstance(error, BlockingIOError) or (isinstance(error, OSError) and error.errno in _TROUBLES):
            return True
        error = error.__cause__
    return False
