"""Files and modules that documents, docstrings and comments name exist: a stale name misleads readers."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.repository import ROOT, files, is_generated, name, packages

TOPS = {*packages(), "tests", "benchmarks", "scripts"}
# A file, named in full (`scheduler/core/core.py`) or by the end of its path (`core/core.py`, `core.py`).
FILE = re.compile(r"(?<![\w./{}<>*$~-])((?:[\w-]+/)*[\w-]+\.(?:py|h|cpp|proto))(?![\w*{<-]|\.\w)")
# A folder, named in full (`scheduler/core/`).
FOLDER = re.compile(rf"(?<![\w./{{}}<>*$~-])((?:{'|'.join(sorted(TOPS))})(?:/[\w-]+)*)/(?![\w*{{<.-])")
# A pattern of files, such as `tests/kernels/faults/<op>.py`.
FORM = re.compile(rf"(?<![\w./-])((?:{'|'.join(sorted(TOPS))})/[\w./-]*<\w+>[\w/<>]*(?:\.[a-z]+)?)")
# A module, or a name in one (`octavo.client.errors.Unavailable`).
MODULE = re.compile(rf"(?<![\w./@-])((?:{'|'.join(sorted(TOPS))})(?:\.[A-Za-z_]\w*)+)(?![\w/]|\.(?:py|md)\b)")
# Files of other projects, and names that are not modules: protobuf packages, spans, keys.
THEIRS = re.compile(r"llama\.cpp|src/|google/|specification/")
NO_MODULE = re.compile(
    r"benchmarks\.md|octavo\.(v1|yaml|router|request|tokenize|placement|residence|sequence|step)\b|\w+\.(key|key_secret|proto|example)$"
)
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "benchmarks" / "results" / "README.md"]
DOCUMENTS += [ROOT / each for each in ("Makefile", "Dockerfile", "docker-compose.yml", "pyproject.toml", ".ci/run")]


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of the docstrings and comments of a Python source, or of all lines of another file."""
    source = path.read_text()
    if path.suffix != ".py":
        yield from enumerate(source.splitlines(), 1)
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield getattr(node, "lineno", 1), ast.get_docstring(node, clean=False) or ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


@cache
def endings(folder: Path) -> set[str]:
    """The endings of the paths of all files in the folder: for a/b/c these are c, b/c and a/b/c."""
    ends = set[str]()
    for path in [*files(under=folder), *files(".proto", under=ROOT / "protos")]:
        parts = Path(name(path)).parts
        ends |= {"/".join(parts[first:]) for first in range(len(parts))}
    return ends


def is_module(dotted: str) -> bool:
    """True for a package, a module, or a name in one."""
    place, *rest = dotted.split(".")
    path = ROOT / place
    while rest and (path / rest[0]).is_dir():
        path /= rest.pop(0)
    if rest and (path / f"{rest[0]}.py").exists():
        path = path / f"{rest.pop(0)}.py"
    elif rest:
        path /= "__init__.py"
    return not rest or (path.exists() and re.search(rf"\b{rest[0]}\b", path.read_text()) is not None)


def missing(text: str, folder: Path) -> list[str]:
    """Names in the text that do not exist. folder: where to look for a file named without a folder."""
    found = [
        each
        for each in FILE.findall(text)
        if not THEIRS.search(each) and each not in endings(ROOT if "/" in each else folder)
    ]
    found += [f"{each}/" for each in FOLDER.findall(text) if not (ROOT / each).is_dir()]
    found += [each for each in FORM.findall(text) if not any(ROOT.glob(re.sub(r"<\w+>", "*", each)))]
    return found + [each for each in MODULE.findall(text) if not NO_MODULE.match(each) and not is_module(each)]


@pytest.mark.parametrize("folder", [*sorted(TOPS), "documents"])
def test_what_is_named_exists(folder: str):
    is_code = folder in TOPS
    paths = files(".py", ".h", ".cpp", ".proto", ".sh", ".yaml", under=ROOT / folder) if is_code else DOCUMENTS
    home = ROOT / folder if folder in packages() else ROOT
    found = [
        f"{name(path)}:{line}: {each}"
        for path in paths
        if not is_generated(path)
        for line, text in texts(path)
        for each in missing(text, home)
    ]
    assert not found, "\n".join(found)
