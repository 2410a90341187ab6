"""Stored responses, bounded by bytes: when there are too many, the oldest of the tenant that has most go.

A tenant sees only its own, and can't push out those of others that have less.
"""

import asyncio
import hashlib
import os
import re
import tempfile
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

# Each counts as whole blocks, as in a file system: so there are not too many small ones, either.
_BLOCK = 4096
# A directory is counted again after so many bytes of this process, as a share of the limit: others write, too.
_RECOUNT = 8
# A file that a killed process did not finish.
_UNFINISHED, _UNFINISHED_S = ".part-", 60.0
_ID = re.compile(r"resp_[0-9a-f]{32}")


class StoreError(Exception):
    """A response can't be stored or read; the message says why."""


class Store(Protocol):
    """The store as the endpoints use it. All methods raise StoreError."""

    max_bytes: int

    async def put(self, tenant: str, response_id: str, data: bytes) -> bool:
        """Returns False if it is larger than the store."""
        ...

    async def get(self, tenant: str, response_id: str) -> bytes | None: ...

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Returns False if there was none."""
        ...


class MemoryStore:
    """Responses of one router process, which are lost at its end."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._ledger = _Ledger()
        self._data: dict[tuple[str, str], bytes] = {}

    async def put(self, tenant: str, response_id: str, data: bytes) -> bool:
        if _cost(len(data)) > self.max_bytes:
            return False
        self._data[tenant, response_id] = data
        self._ledger.add(tenant, response_id, _cost(len(data)))
        while self._ledger.total > self.max_bytes:
            del self._data[self._ledger.drop()]
        return True

    async def get(self, tenant: str, response_id: str) -> bytes | None:
        return self._data.get((tenant, response_id))

    async def delete(self, tenant: str, response_id: str) -> bool:
        self._ledger.remove(tenant, response_id)
        return self._data.pop((tenant, response_id), None) is not None


class FileStore:
    """A directory that any number of routers may share: one folder a tenant, one file a response.

    A file appears whole or not at all. Files are written and read on a thread of the store's own.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        """Raises StoreError if the directory can't be used."""
        self.max_bytes = max_bytes
        self._directory = directory
        self._thread = ThreadPoolExecutor(1, "responses")
        # Bytes at the last count, and written since.
        self._counted = self._written = 0
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                pass
            self._recount()
        except OSError as error:
            raise StoreError(f"responses_dir={str(directory)!r}: {error.strerror or error}") from None

    async def put(self, tenant: str, response_id: str, data: bytes) -> bool:
        if _cost(len(data)) > self.max_bytes:
            return False
        await self._run(self._put, self.path(tenant, response_id), data)
        return True

    async def get(self, tenant: str, response_id: str) -> bytes | None:
        if not _ID.fullmatch(response_id):
            return None
        return await self._run(_read, self.path(tenant, response_id))

    async def delete(self, tenant: str, response_id: str) -> bool:
        if not _ID.fullmatch(response_id):
            return False
        return await self._run(_unlink, self.path(tenant, response_id))

    async def _run(self, work, *arguments):
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)
        except OSError as error:
            raise StoreError(f"responses_dir={str(self._directory)!r}: {error.strerror or error}") from error

    def path(self, tenant: str, response_id: str) -> Path:
        # A tenant's name may not be one for a folder.
        return self._directory / hashlib.sha256(tenant.encode()).hexdigest()[:32] / f"{response_id}.json"

    def _put(self, path: Path, data: bytes) -> None:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        number, name = tempfile.mkstemp(prefix=_UNFINISHED, dir=path.parent)
        try:
            with os.fdopen(number, "wb") as file:
                file.write(data)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        self._written += _cost(len(data))
        if self._counted + self._written > self.max_bytes or self._written > self.max_bytes // _RECOUNT:
            self._recount()

    def _recount(self) -> None:
        """Counts the files. If there are too many, drops some, so that the next count is not due at once."""
        found: list[tuple[float, str, str, int]] = []
        for folder in self._directory.iterdir():
            if not folder.is_dir():
                continue
            with os.scandir(folder) as files:
                for file in files:
                    try:
                        stat = file.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        # Another router dropped it.
                        continue
                    if file.name.startswith(_UNFINISHED) and time.time() - stat.st_mtime > _UNFINISHED_S:
                        Path(file.path).unlink(missing_ok=True)
                    elif file.name.endswith(".json"):
                        found.append((stat.st_mtime, folder.name, file.name, stat.st_size))
        ledger = _Ledger()
        for _, folder_name, name, size in sorted(found):
            ledger.add(folder_name, name, _cost(size))
        most = self.max_bytes
        if ledger.total > most:
            while ledger.total > most - most // _RECOUNT:
                folder_name, name = ledger.drop()
                (self._directory / folder_name / name).unlink(missing_ok=True)
        self._counted, self._written = ledger.total, 0


def new_store(directory: str, max_bytes: int) -> Store:
    """directory: empty: in memory. Raises StoreError."""
    return FileStore(Path(directory), max_bytes) if directory else MemoryStore(max_bytes)


class _Ledger:
    """Who has how much."""

    def __init__(self) -> None:
        self.total = 0
        self._of_tenant: dict[str, int] = {}
        # Costs by name, the oldest first.
        self._entries: dict[str, OrderedDict[str, int]] = {}

    def add(self, tenant: str, name: str, cost: int) -> None:
        self._entries.setdefault(tenant, OrderedDict())[name] = cost
        self._of_tenant[tenant] = self._of_tenant.get(tenant, 0) + cost
        self.total += cost

    def remove(self, tenant: str, name: str) -> None:
        cost = self._entries.get(tenant, OrderedDict()).pop(name, 0)
        if cost:
            self._take_off(tenant, cost)

    def drop(self) -> tuple[str, str]:
        """Removes the oldest entry of the tenant that has most. Returns its tenant and name."""
        tenant = max(self._of_tenant, key=self._of_tenant.__getitem__)
        name, cost = self._entries[tenant].popitem(last=False)
        self._take_off(tenant, cost)
        return tenant, name

    def _take_off(self, tenant: str, cost: int) -> None:
        self.total -= cost
        self._of_tenant[tenant] -= cost
        if not self._entries[tenant]:
            del self._entries[tenant], self._of_tenant[tenant]


def _cost(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _unlink(path: Path) -> bool:
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True
