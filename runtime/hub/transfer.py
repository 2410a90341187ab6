"""Downloads files into the hub's cache, continues interrupted downloads and verifies checksums.

huggingface_hub 2.4.0 does neither over HTTP: it writes to a file with a random name, deletes it after an error, and
compares only sizes. Its Xet downloads do not keep partial files either. Here its `http_get` writes to
`blobs/DIGEST.incomplete`, which is renamed to `blobs/DIGEST` after the check. `snapshot_download` then finds the blob
and only links it.
"""

import contextlib
import hashlib
import os
import queue
import re
import shutil
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

from filelock import FileLock, Timeout
from huggingface_hub import constants, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.file_download import http_get, repo_folder_name
from huggingface_hub.utils import build_hf_headers

from runtime.hub.errors import HubError
from runtime.hub.files import RepoFile
from runtime.hub.library_errors import hub_errors
from runtime.hub.progress import Progress, bytes_text

# The default of huggingface_hub.
_FILES_AT_ONCE = 8
_LOCK_POLL_S = 0.5
_RANGE_NOT_SATISFIABLE = 416
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def fetch_blobs(repo: str, commit: str, files: Sequence[RepoFile], progress: Progress) -> None:
    """Downloads `files` into the cache's blobs, several at once. Raises HubError.

    After an error or Ctrl-C the partial files stay, and the next call downloads the rest.
    """
    if strange := [file for file in files if not _DIGEST.fullmatch(file.digest)]:
        # The digest becomes a file name, so it must not be a path.
        raise HubError(f"the hub lists {strange[0].digest!r} as the checksum of {strange[0].name}, which is not one")
    transfers = [_Transfer(repo, commit, file, progress) for file in files]
    _check_space(transfers)
    progress.begin(repo, {file.name: file.size for file in files})
    waiting, ended = queue.SimpleQueue[_Transfer](), queue.SimpleQueue[BaseException | None]()
    for transfer in transfers:
        waiting.put(transfer)
    stop = threading.Event()

    def work() -> None:
        with contextlib.suppress(queue.Empty):
            while not stop.is_set():
                transfer = waiting.get_nowait()
                try:
                    transfer.run(stop)
                    ended.put(None)
                except BaseException as error:  # noqa: BLE001 (raised below, in the caller's thread)
                    ended.put(error)

    try:
        for _ in range(min(_FILES_AT_ONCE, len(transfers))):
            # Daemon threads: Ctrl-C does not wait for a network timeout.
            threading.Thread(target=work, name="octavo-hub", daemon=True).start()
        for _ in transfers:
            if (error := ended.get()) is not None:
                raise error
    finally:
        stop.set()


class _Stopped(Exception):
    """The download was stopped: another file failed, or the user pressed Ctrl-C."""


class _Transfer:
    def __init__(self, repo: str, commit: str, file: RepoFile, progress: Progress):
        self._repo, self._commit, self._file, self._progress = repo, commit, file, progress
        folder = repo_folder_name(repo_id=repo, repo_type="model")
        cache = Path(constants.HF_HUB_CACHE)
        self._blob = cache / folder / "blobs" / file.digest
        self._partial = self._blob.with_name(f"{file.digest}.incomplete")
        # huggingface_hub uses the same lock.
        self._lock = cache / ".locks" / folder / f"{file.digest}.lock"

    @property
    def num_missing_bytes(self) -> int:
        if self._blob.exists():
            return 0
        return max(self._file.size - _size(self._partial), 0)

    def run(self, stop: threading.Event) -> None:
        """Raises HubError."""
        with hub_errors(self._repo):
            self._blob.parent.mkdir(parents=True, exist_ok=True)
            self._lock.parent.mkdir(parents=True, exist_ok=True)
            with _held(self._lock, stop):
                # Another process may have been faster.
                if not self._blob.exists():
                    self._download(stop)
                    self._check()
                    os.replace(self._partial, self._blob)
            self._progress.advance(self._file.name, self._file.size)

    def _download(self, stop: threading.Event) -> None:
        file, have = self._file, _size(self._partial)
        if have > file.size:
            self._partial.unlink()
            have = 0
        if file.size - have > constants.MAX_HTTP_DOWNLOAD_SIZE:
            raise HubError(
                f"{file.name} of {self._repo} has {bytes_text(file.size)}, and the hub serves files of more than "
                f"{bytes_text(constants.MAX_HTTP_DOWNLOAD_SIZE)} only through Xet: download it with "
                f"`hf download {self._repo} {file.name}`, then run this again"
            )
        with self._partial.open("ab") as out, self._sized_as_listed():
            http_get(
                hf_hub_url(self._repo, file.name, revision=self._commit),
                out,
                resume_size=have,
                # Uncompressed: ranges count the bytes that are sent.
                headers={**build_hf_headers(), "accept-encoding": "identity"},
                expected_size=file.size,
                displayed_filename=file.name,
                tqdm_class=cast(Any, partial(_Bar, partial(self._progress.advance, file.name), stop)),
            )

    @contextlib.contextmanager
    def _sized_as_listed(self) -> Iterator[None]:
        """Deletes a file whose size differs from the listing; continuing it would fail each time."""
        try:
            yield
        except HfHubHTTPError as error:
            if error.response.status_code == _RANGE_NOT_SATISFIABLE:
                self._drop()
            raise
        except OSError as error:
            # http_get raises this when the answer ended and the size is not the expected one.
            if error.errno is not None:
                raise
            size = _size(self._partial)
            self._drop()
            raise HubError(
                f"{self._file.name} of {self._repo} has {size} bytes, but the hub lists "
                f"{self._file.size}; it was deleted; run this again to download it anew"
            ) from None

    def _drop(self) -> None:
        self._partial.unlink()
        self._progress.advance(self._file.name, 0)

    def _check(self) -> None:
        self._progress.check(self._file.name)
        found = _digest(self._partial, self._file.digest)
        if found != self._file.digest:
            self._drop()
            raise HubError(
                f"{self._file.name} of {self._repo} has the wrong checksum: {found[:12]}..., but the hub "
                f"lists {self._file.digest[:12]}...; it was deleted; run this again to download it anew"
            )


class _Bar:
    """Takes the place of http_get's tqdm bar."""

    def __init__(self, advance: Any, stop: threading.Event, *, initial: int = 0, **_: object):
        self._advance, self._stop, self._done = advance, stop, initial
        advance(initial)

    def update(self, num_bytes: float | None = 1) -> None:
        if self._stop.is_set():
            raise _Stopped
        self._done += int(num_bytes or 0)
        self._advance(self._done)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def _held(path: Path, stop: threading.Event) -> Iterator[None]:
    """Holds the lock of a file. Other processes wait and then find the file complete."""
    lock = FileLock(path, mode=0o664)
    while True:
        try:
            lock.acquire(timeout=_LOCK_POLL_S)
            break
        except Timeout:
            if stop.is_set():
                raise _Stopped from None
    try:
        yield
    finally:
        lock.release()


def _check_space(transfers: Sequence[_Transfer]) -> None:
    """Raises HubError if the disk lacks room for all files."""
    place = Path(constants.HF_HUB_CACHE)
    while not place.exists() and place != place.parent:
        place = place.parent
    needed, free = sum(transfer.num_missing_bytes for transfer in transfers), shutil.disk_usage(place).free
    if needed > free:
        raise HubError(
            f"the disk of {constants.HF_HUB_CACHE} has {bytes_text(free)} free, but the download "
            f"needs {bytes_text(needed)}: free some space, or set HF_HOME to a directory on another disk"
        )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _digest(path: Path, like: str) -> str:
    """sha256 if `like` has 64 digits; otherwise git's sha1 of the contents."""
    with path.open("rb") as file:
        if len(like) == 64:
            return hashlib.file_digest(file, "sha256").hexdigest()
        begun = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
        return hashlib.file_digest(file, lambda: begun).hexdigest()
