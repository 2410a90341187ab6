"""Docstrings and comments say what a thing is; README fits on a page. The rest of style is judged by reading."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.support.repository import ROOT, files, is_generated, name

# A docstring or comment that begins so leaves its subject to the reader.
OPENINGS = re.compile(r"(?:Of|Whether|Whose|Whom|Whoever)\b")
# A docstring may not begin with it, either; a comment may, where it is a whole sentence.
QUESTION = re.compile(r"What\b(?!-if)")
RIDDLES = re.compile(r"\b(?:whoever|whom)\b", re.IGNORECASE)
# How a comment begins, by the file's suffix; a line that only goes on with one begins nothing.
MARKERS = {".h": "//", ".cpp": "//", ".js": "//", ".go": "//", ".proto": "//"} | dict.fromkeys(
    (".sh", ".yaml", ".yml", ".toml"), "#"
)
MAX_README_LINES = 150


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each docstring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            text := ast.get_docstring(node)
        ):
            yield node.body[0].lineno, text


def python_prose(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each docstring and of each block of comments."""
    yield from docstrings(source)
    comments = [
        (token.start[0], token.string)
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    yield from blocks(comments, "#")


def blocks(comments: list[tuple[int, str]], marker: str) -> Iterator[tuple[int, str]]:
    """Joins comments on consecutive lines."""
    first, last, texts = 0, 0, list[str]()
    for line, comment in comments:
        if line != last + 1 and texts:
            yield first, " ".join(texts)
            texts = []
        first = first if texts else line
        last = line
        texts.append(comment.lstrip(marker).strip())
    if texts:
        yield first, " ".join(texts)


def prose(path: Path) -> Iterator[tuple[int, str]]:
    source = path.read_text()
    if path.suffix == ".py":
        yield from python_prose(source)
        return
    marker = MARKERS[path.suffix]
    lines = [(number, line.partition(marker)) for number, line in enumerate(source.splitlines(), 1)]
    yield from blocks([(number, after) for number, (_, found, after) in lines if found], marker)


def test_the_finder_finds():
    source = '"""Of all."""\n\nx = 1  # Whose it is\n# and\n\n# A thing\n# whom nobody knows\n'
    found = list(python_prose(source))
    assert [text for _, text in found if OPENINGS.match(text)] == ["Of all.", "Whose it is and"]
    assert [text for _, text in found if RIDDLES.search(text)] == ["A thing whom nobody knows"]
    asked = list(docstrings('"""What-if plans."""\n\ndef f():\n    """What it is."""\n'))
    assert [text for _, text in asked if QUESTION.match(text)] == ["What it is."]


def test_docstrings_and_comments_begin_with_what_a_thing_is():
    found = [
        f"{name(path)}:{line}: {text[:80]}"
        for path in files(".py", *MARKERS)
        if not is_generated(path)
        if path != Path(__file__)
        for line, text in prose(path)
        if OPENINGS.match(text) or RIDDLES.search(text)
    ]
    assert not found, f"{len(found)}:\n" + "\n".join(found)


def test_docstrings_do_not_begin_with_what():
    found = [
        f"{name(path)}:{line}: {text[:80]}"
        for path in files(".py")
        if not is_generated(path)
        for line, text in docstrings(path.read_text())
        if QUESTION.match(text)
    ]
    assert not found, f"{len(found)}:\n" + "\n".join(found)


def test_documents_have_no_riddles():
    found = [
        f"{name(path)}:{line}: {text.strip()[:80]}"
        for path in files(".md")
        for line, text in enumerate(path.read_text().splitlines(), 1)
        if RIDDLES.search(text)
    ]
    assert not found, "\n".join(found)


def test_the_readme_fits_on_a_page():
    assert len((ROOT / "README.md").read_text().splitlines()) < MAX_README_LINES
