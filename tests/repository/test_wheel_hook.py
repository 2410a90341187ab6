"""The packages move into `octavo` when wheels are built (clients/python/hatch_build.py), and no module's name stays
behind."""

import ast
import importlib.util
import re
from collections.abc import Iterator
from itertools import pairwise
from types import ModuleType

import pytest

from tests.support.repository import ROOT, files, is_generated, name, packages

MOVED = [package for package in packages() if package != "octavo"]


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "clients/python/hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from kernels.linear import x", "from octavo.kernels.linear import x"),
        ("def f():\n    from router import server", "def f():\n    from octavo.router import server"),
        ("from protos import (  # a\n    b as c,\n)", "from octavo.protos import (  # a\n    b as c,\n)"),
        ("import worker.layers.mlp as mlp", "import octavo.worker.layers.mlp as mlp"),
        # The statement binds the same name as before.
        ("import runtime", "import octavo.runtime as runtime"),
        ("import os, worker.layers", "import os, octavo.worker.layers, octavo.worker as worker"),
        # Positions are bytes.
        ("é = 'ü'; from worker import é", "é = 'ü'; from octavo.worker import é"),
    ],
)
def test_imports_are_rewritten(hook: ModuleType, source: str, expected: str) -> None:
    assert hook.rewritten(source.encode()).decode() == expected


@pytest.mark.parametrize(
    "source",
    [
        "from octavo.client import base\nimport workers, octavo",
        "'''\nfrom router import server\n'''\nrouter = 'router.server'  # import router",
    ],
)
def test_nothing_else_is_rewritten(hook: ModuleType, source: str) -> None:
    assert hook.rewritten(source.encode()).decode() == source


def named_modules(tree: ast.AST) -> Iterator[str]:
    """The strings that name a module, or a command that runs one. The hook would leave them as they are."""
    docstrings = {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    run = re.compile(rf"-m ({'|'.join(MOVED)})\b")
    dotted = re.compile(rf"({'|'.join(MOVED)})(\.[a-z_]\w*)+")
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            place = ROOT / node.value.replace(".", "/")
            if run.search(node.value) or (
                dotted.fullmatch(node.value) and (place.is_dir() or place.with_suffix(".py").is_file())
            ):
                yield node.value
        elements = node.elts if isinstance(node, ast.List | ast.Tuple) else getattr(node, "args", [])
        for one, other in pairwise(elements if isinstance(elements, list) else []):
            match one, other:
                case ast.Constant(value="-m"), ast.Constant(value=str(module)) if module.partition(".")[0] in MOVED:
                    yield f"-m {module}"


def test_no_string_names_a_module() -> None:
    found = [
        f"{name(path)}: {text!r}: derive it from __name__ or __package__, or from configs.programs.module_of"
        for package in packages()
        for path in files(".py", under=ROOT / package)
        if not is_generated(path)
        for text in named_modules(ast.parse(path.read_text()))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    ["x('runtime.tokenizer.convert')", "[p, '-m', 'router']", "f'python -m worker {x}'", "run(p, '-m', 'worker', 1)"],
)
def test_names_in_strings_are_seen(source: str) -> None:
    assert list(named_modules(ast.parse(source)))


@pytest.mark.parametrize(
    "source", ["'router'", "'worker.key'", "[p, '-m', 'octavo.doctor.probe']", "ask('topo', '-m')"]
)
def test_other_strings_are_not(source: str) -> None:
    assert not list(named_modules(ast.parse(source)))
