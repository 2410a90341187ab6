"""The repository's root and source files, for the tests that read them."""

import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_SKIPPED = {"__pycache__", "build", "dist", "node_modules"}


def packages() -> list[str]:
    """The packages that an installation contains, by their names in the repository, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return project["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]["packages"]


def files(*suffixes: str, under: Path = ROOT) -> Iterator[Path]:
    """Files with one of the suffixes (all if none is given), sorted, without hidden folders and build outputs."""
    for path in sorted(under.iterdir()):
        if path.name.startswith(".") or path.name in _SKIPPED or path.name.endswith(".egg-info"):
            continue
        if path.is_dir():
            yield from files(*suffixes, under=path)
        elif not suffixes or path.suffix in suffixes:
            yield path


def is_generated(path: Path) -> bool:
    """True for a file that protoc wrote."""
    return "_pb2" in path.name


def name(path: Path) -> str:
    """The path as messages show it: from the repository's root."""
    return str(path.relative_to(ROOT))
