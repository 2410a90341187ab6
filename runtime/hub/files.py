"""Chooses the files of a repository to download: safetensors or GGUF weights, config, tokenizer, chat template.

Code (*.py) and pickled weights (*.bin, *.pt) are never downloaded: loading them can run any program.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from runtime.hub.errors import HubError
from runtime.hub.progress import bytes_text

_INDEX = "model.safetensors.index.json"
_TOKENIZER_FILES = {
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
}
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Vision projectors and importance matrices are GGUF files, but not models.
_NO_MODEL = re.compile(r"(^|[-._])(mmproj|imatrix)([-._]|$)", re.IGNORECASE)
_SPLIT = re.compile(r"-\d{5}-of-(\d{5})$")
_QUANTIZATION = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|TQ\d_\d|MXFP4\w*|BF16|F16|F32|FP16|FP32))(?=[-.]|$)", re.IGNORECASE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RepoFile:
    """A file in a repository. name: its path there. digest: sha256 (64 digits) for a large file, git's sha1 for others;
    empty if it comes from the cache's listing."""

    name: str
    size: int
    digest: str = ""

    @property
    def stem(self) -> str:
        return PurePosixPath(self.name).stem


def parse_name(model: str) -> tuple[str, str]:
    """ORG/NAME:CHOICE -> (ORG/NAME, CHOICE). CHOICE may be missing."""
    repo, _, choice = model.partition(":")
    return repo, choice


def choose(repo: str, files: Sequence[RepoFile], choice: str = "") -> list[RepoFile]:
    """The files to download. choice: a quantization (Q4_K_M) or a file's name, for a repository with several GGUF
    files. Raises HubError."""
    names = {file.name for file in files}
    gguf = [file for file in files if file.name.endswith(".gguf") and not _NO_MODEL.search(file.stem)]
    if choice:
        return [_chosen(repo, gguf, choice)]
    if weights := _safetensors(names):
        if "config.json" not in names:
            raise HubError(f"{repo} has safetensors but no config.json: it is not a complete model")
        return [file for file in files if file.name in weights or _describes(file.name)]
    if len(gguf) == 1:
        return [_whole(repo, gguf[0])]
    if gguf:
        raise HubError(f"{repo} has {len(gguf)} GGUF files; choose one: {_offers(repo, gguf)}")
    pickles = sorted(name for name in names if name.endswith(_PICKLES))
    if pickles:
        raise HubError(
            f"{repo} has its weights only as pickles ({pickles[0]}{', ...' if len(pickles) > 1 else ''}), which can "
            f"run code when they are loaded: take a repository with safetensors or GGUF files"
        )
    raise HubError(f"{repo} has no safetensors and no GGUF files; it has {', '.join(sorted(names)[:5]) or 'none'}")


def _safetensors(names: Collection[str]) -> set[str]:
    """The files that worker.weights reads. Some repositories have a second copy, consolidated.safetensors."""
    top = {name for name in names if name.endswith(".safetensors") and "/" not in name}
    if _INDEX in names:
        return {name for name in top if name.startswith("model")}
    return {"model.safetensors"} & top or top


def _describes(name: str) -> bool:
    return "/" not in name and (name.endswith(".json") or name in _TOKENIZER_FILES)


def _chosen(repo: str, gguf: Sequence[RepoFile], choice: str) -> RepoFile:
    if not gguf:
        raise HubError(f"{repo} has no GGUF files to choose {choice!r} from: leave :{choice} out")
    exact = [file for file in gguf if choice in (file.name, file.stem, PurePosixPath(file.name).name)]
    token = re.compile(rf"(^|[-._]){re.escape(choice)}(?=[-.]|$)", re.IGNORECASE)
    fitting = exact or [file for file in gguf if token.search(file.stem)]
    if not fitting:
        raise HubError(f"{repo} has no GGUF file {choice!r}; it has {_offers(repo, gguf)}")
    whole = [file for file in fitting if not _SPLIT.search(file.stem)]
    if len(whole) > 1:
        names = ", ".join(f"{repo}:{file.name}" for file in whole)
        raise HubError(f"{choice!r} fits {len(whole)} GGUF files of {repo}; choose one: {names}")
    return whole[0] if whole else _whole(repo, fitting[0])


def _whole(repo: str, file: RepoFile) -> RepoFile:
    if split := _SPLIT.search(file.stem):
        raise HubError(
            f"{file.name} of {repo} is one of {int(split[1])} parts, but Octavo reads only files in one part: "
            f"choose a smaller quantization, or download the parts and join them (llama-gguf-split --merge)"
        )
    return file


def _offers(repo: str, gguf: Sequence[RepoFile]) -> str:
    labels = [_label(file) for file in gguf]
    offers = [
        f"{repo}:{label if labels.count(label) == 1 else file.name} ({bytes_text(file.size)})"
        for file, label in zip(gguf, labels, strict=True)
        if not _SPLIT.search(file.stem)
    ]
    return ", ".join(offers) or "only files in parts, but Octavo reads only files in one part"


def _label(file: RepoFile) -> str:
    found = _QUANTIZATION.search(file.stem)
    return found[1] if found else file.name
