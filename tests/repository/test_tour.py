"""The files and functions that the tour's steps name exist."""

import ast
import re

import pytest

from tests.support.repository import ROOT

TOUR = ROOT / "docs" / "tour.md"
# A file, a colon, and names in it: `name` or `Class.name`.
STOP = re.compile(r"`([\w/]+\.(?:py|proto))`: (`[\w.]+`(?:, `[\w.]+`)*)")
STOPS = [
    pytest.param(path, name, id=f"{path}:{name}")
    for path, names in STOP.findall(TOUR.read_text())
    for name in re.findall(r"`([\w.]+)`", names)
]


def names_of(body: list[ast.stmt], prefix: str = "") -> set[str]:
    """`name` and `Class.name` of all that a module defines."""
    names = set[str]()
    for node in body:
        if isinstance(node, ast.ClassDef):
            names |= {prefix + node.name, *names_of(node.body, f"{prefix}{node.name}.")}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(prefix + node.name)
        elif isinstance(node, ast.Assign):
            names |= {prefix + target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


@pytest.mark.parametrize(("path", "name"), STOPS)
def test_a_stop_exists(path: str, name: str) -> None:
    text = (ROOT / path).read_text()
    if path.endswith(".proto"):
        assert re.search(rf"^(message|service|enum) {name}\b", text, re.MULTILINE)
    else:
        assert name in names_of(ast.parse(text).body)


def test_each_step_has_a_stop() -> None:
    steps = re.split(r"^(\d+)\. ", TOUR.read_text(), flags=re.MULTILINE)[1:]
    numbers, bodies = [int(number) for number in steps[::2]], steps[1::2]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) > 30
    assert [number for number, body in zip(numbers, bodies, strict=True) if not STOP.search(body)] == []
