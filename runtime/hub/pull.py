"""Downloads models from the Hugging Face hub."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import CachedRepoTreeNotFoundError
from huggingface_hub.utils.tqdm import tqdm

from runtime.hub.errors import HubError, UnreachableError
from runtime.hub.files import RepoFile, choose, parse_name
from runtime.hub.library_errors import hub_errors
from runtime.hub.progress import Lines, Progress
from runtime.hub.transfer import fetch_blobs

log = logging.getLogger("octavo.hub")


@dataclass(frozen=True, slots=True, kw_only=True)
class PulledModel:
    """A model in the hub's cache. path: a directory with config.json and safetensors, or a .gguf file. warning: why the
    hub could not be reached, if the files come from an earlier download; else empty."""

    repo: str
    commit: str
    path: Path
    num_files: int
    num_bytes: int
    num_downloaded: int
    warning: str = ""


def pull(model: str, progress: Progress | None = None) -> PulledModel:
    """Downloads the missing files of ORG/NAME or ORG/NAME:CHOICE and verifies their checksums. Raises HubError.

    CHOICE: see `runtime.hub.files.choose`. Reads the variables HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE. If
    the hub cannot be reached, a complete earlier download is used. progress: None logs lines.
    """
    repo, choice = parse_name(model)
    try:
        with hub_errors(repo):
            commit = huggingface_hub.model_info(repo, timeout=constants.HF_HUB_ETAG_TIMEOUT).sha
        assert commit is not None
    except UnreachableError as error:
        return _earlier(repo, choice, error)
    try:
        chosen = choose(repo, _cached_listing(repo, commit), choice)
    except CachedRepoTreeNotFoundError:
        chosen = None
    if chosen is None or _missing(repo, commit, chosen):
        chosen = choose(repo, _listing(repo, commit), choice)
    missing = _missing(repo, commit, chosen)
    if missing:
        fetch_blobs(repo, commit, missing, progress or Lines(log.info))
        _link(repo, commit, missing)
    return _pulled(repo, commit, chosen, num_downloaded=len(missing))


def pull_config(model: str) -> Path:
    """Downloads only the config.json of ORG/NAME. Raises HubError."""
    repo, _ = parse_name(model)
    with hub_errors(repo):
        return Path(huggingface_hub.hf_hub_download(repo, "config.json"))


def _listing(repo: str, commit: str) -> list[RepoFile]:
    with hub_errors(repo):
        return [
            RepoFile(name=entry.path, size=entry.size, digest=entry.lfs.sha256 if entry.lfs else entry.blob_id)
            for entry in huggingface_hub.list_repo_tree(repo, recursive=True, revision=commit)
            if isinstance(entry, huggingface_hub.RepoFile)
        ]


def _cached_listing(repo: str, commit: str | None = None) -> list[RepoFile]:
    """The listing in the cache, which has no digests. Raises CachedRepoTreeNotFoundError."""
    entries = huggingface_hub.get_cached_repo_tree(repo, revision=commit)
    return [RepoFile(name=entry.path, size=entry.size) for entry in entries]


def _missing(repo: str, commit: str, files: list[RepoFile]) -> list[RepoFile]:
    return [file for file in files if _cached(repo, commit, file.name) is None]


def _cached(repo: str, commit: str, name: str) -> Path | None:
    found = huggingface_hub.try_to_load_from_cache(repo, name, revision=commit)
    return Path(found) if isinstance(found, str) else None


class _Silent(tqdm):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{**kwargs, "disable": True})


def _link(repo: str, commit: str, files: list[RepoFile]) -> None:
    """Lets huggingface_hub make a snapshot from the blobs. Raises HubError."""
    names = [file.name for file in files]
    with hub_errors(repo):
        # fnmatch patterns that match exactly these names.
        patterns = [name.replace("[", "[[]") for name in names]
        snapshot = Path(huggingface_hub.snapshot_download(repo, allow_patterns=patterns, tqdm_class=_Silent))
    if snapshot.name != commit:
        raise HubError(f"{repo} changed on the hub during the download; run this again")
    blobs = snapshot.parents[1] / "blobs"
    for file in files:
        if not os.path.samefile(snapshot / file.name, blobs / file.digest):
            raise HubError(f"the hub's ETag of {file.name} in {repo} differs from the checksum in its listing")


def _earlier(repo: str, choice: str, reason: UnreachableError) -> PulledModel:
    """Finds an earlier download in the cache. Raises UnreachableError if files are missing."""
    try:
        with hub_errors(repo):
            snapshot = Path(huggingface_hub.snapshot_download(repo, local_files_only=True, allow_patterns=[]))
    except UnreachableError:
        raise UnreachableError(f"{reason}; and {constants.HF_HUB_CACHE} has no {repo}") from None
    commit = snapshot.name
    try:
        files = _cached_listing(repo, commit)
    except CachedRepoTreeNotFoundError:
        # An older huggingface_hub downloaded it and kept no listing: take the files that are there.
        files = [
            RepoFile(name=path.relative_to(snapshot).as_posix(), size=path.stat().st_size)
            for path in sorted(snapshot.rglob("*"))
            if path.is_file()
        ]
    chosen = choose(repo, files, choice)
    if missing := _missing(repo, commit, chosen):
        names = ", ".join(file.name for file in missing[:3])
        raise UnreachableError(f"{reason}; and {constants.HF_HUB_CACHE} lacks {names} of {repo}") from None
    log.info("%s; using %s from %s", reason, repo, snapshot)
    return _pulled(repo, commit, chosen, num_downloaded=0, warning=str(reason))


def _pulled(repo: str, commit: str, files: list[RepoFile], *, num_downloaded: int, warning: str = "") -> PulledModel:
    path = _cached(repo, commit, files[0].name)
    if path is None:
        raise HubError(f"{files[0].name} of {repo} disappeared from {constants.HF_HUB_CACHE} during the download")
    if path.suffix != ".gguf":
        config = _cached(repo, commit, "config.json")
        assert config is not None
        path = config.parent
    return PulledModel(
        repo=repo,
        commit=commit,
        path=path,
        num_files=len(files),
        num_bytes=sum(file.size for file in files),
        num_downloaded=num_downloaded,
        warning=warning,
    )
