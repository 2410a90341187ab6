"""Imports between our packages form a DAG, so that a router can be read, tested and shipped without a worker.

An import within a function counts like one at the top of a file: it is the same dependency, only later.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.support.repository import ROOT, files, name, packages

LEAVES = {"protos", "configs", "kernels", "runtime"}
ALLOWED: dict[str, set[str]] = {
    **{leaf: set() for leaf in LEAVES},
    "worker": {"kernels", "protos", "configs", "runtime"},
    "scheduler": {"protos", "configs", "runtime"},
    "router": {"protos", "configs", "runtime"},
    "octavo": LEAVES | {"worker", "scheduler", "router"},
}
OUTSIDE = {"tests", "benchmarks"}
OURS = set(ALLOWED) | OUTSIDE


def imported_packages(source: str, package: str) -> Iterator[tuple[int, str]]:
    """(line, top-level package) of every import in a module of `package`, dynamic ones too; relative ones stay in."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name.partition(".")[0]) for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield node.lineno, module.partition(".")[0]
            case ast.ImportFrom(level=level) if level > 0:
                yield node.lineno, package
            case ast.Call(
                func=ast.Name(id="__import__" | "import_module") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                yield node.lineno, module.partition(".")[0]


def violations(source: str, package: str) -> list[str]:
    allowed = ALLOWED[package] | {package}
    return [
        f"line {line}: {package} imports {imported}, but may import only {sorted(allowed)}"
        for line, imported in imported_packages(source, package)
        if imported in OURS and imported not in allowed
    ]


def test_every_installed_package_has_a_place_in_the_dag():
    assert set(packages()) == set(ALLOWED)


def test_allowed_edges_have_no_cycle():
    remaining = {package: set(edges) for package, edges in ALLOWED.items()}
    while remaining:
        free = {package for package, edges in remaining.items() if not edges & set(remaining)}
        assert free, f"a cycle among {sorted(remaining)}"
        for package in free:
            del remaining[package]


def test_packages_import_only_what_the_dag_allows():
    found = [
        f"{name(path)} {violation}"
        for package in ALLOWED
        for path in files(".py", under=ROOT / package)
        for violation in violations(path.read_text(), package)
    ]
    assert not found, "\n".join(found)


def test_kernels_package_is_empty():
    # transformers probes a package called `kernels` and takes ours for the one of that name on the registry if it has
    # a version or any of that one's names.
    assert (ROOT / "kernels" / "__init__.py").read_text() == ""


def test_violations_are_seen_in_every_form():
    # Guards this file: a reader that misses a form of import would let the DAG rot.
    for source in (
        "import worker.process.loop",
        "import os, octavo",
        "from tests.fakes import worker",
        "def f():\n    from router import server",
        "if True:\n    import benchmarks",
        "import importlib\nimportlib.import_module('worker.process.loop')",
        "__import__('router')",
    ):
        assert violations(source, "scheduler"), source
    for source in (
        "from protos import step_pb2",
        "from scheduler.core.core import Core",
        "from . import a",
        "import os",
    ):
        assert not violations(source, "scheduler"), source


def test_top_level_folders_with_python_are_known():
    # A new top-level package must take its place in the DAG, or stand outside knowingly: docs/ has programs of users.
    tops = {Path(name(path)).parts[0] for path in files(".py") if path.parent != ROOT}
    assert tops <= OURS | {"scripts", "docs"}, sorted(tops - OURS)
