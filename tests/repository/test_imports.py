"""Imports go one way: between packages, so that a router can be read, tested and shipped without a worker; and inside
a package, so that a newcomer can read it from its bottom to its top.

An import within a function counts like one at the top of a file: it is the same dependency, only later. One for type
checkers alone may go up inside a package: a lower module may name the class above it that calls it.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.imports import circles, entries_of, floors_of, imports_of, sources_of
from tests.support.repository import ROOT, files, name, packages

LEAVES = {"protos", "configs", "kernels", "runtime"}
ALLOWED: dict[str, set[str]] = {
    **{leaf: set() for leaf in LEAVES},
    "runtime": {"protos"},
    "worker": {"kernels", "protos", "configs", "runtime"},
    "scheduler": {"protos", "configs", "runtime"},
    "router": {"protos", "configs", "runtime"},
    "octavo": LEAVES | {"worker", "scheduler", "router"},
}
OUTSIDE = {"tests", "benchmarks"}
OURS = set(ALLOWED) | OUTSIDE


def imported_packages(source: str, package: str) -> Iterator[tuple[int, str]]:
    """(line, top-level package) of every import in a module of `package`; also dynamic and relative ones."""
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


# What would close no circle today, and is wrong all the same: module or folder -> what neither it nor anything in it
# imports.
FORBIDDEN = {
    # The desk is a pure function of a message, a model and a text.
    "router.request": ("router.intake", "router.search", "router.api"),
    "router.replicas": ("router.intake", "router.search", "router.api"),
    "router.streams": ("router.intake", "router.search", "router.api"),
    "router.intake": ("router.api",),
    "scheduler.sessions": ("scheduler.step_loop",),
    # A layer and a model run wherever a backend computes them.
    "worker.layers": ("worker.models", "worker.cpu", "worker.gpu", "worker.process"),
    "worker.models": ("worker.cpu", "worker.gpu", "worker.process"),
    "worker.weights": ("worker.layers", "worker.models"),
    "worker.cpu": ("worker.gpu", "worker.process"),
    "worker.gpu": ("worker.cpu", "worker.process"),
    "octavo.local": ("octavo.cli", "octavo.bench", "octavo.tune"),
}
# The most entries of a folder.
MOST_ENTRIES = 20
# Packages behind a door: the only module that imports one, within the function that an option calls.
DOORS = {"router.compat": "router.server"}
# The scheduling core is a function of its inputs: it does no I/O, reads no clock, and starts no threads.
IMPURE = {"asyncio", "grpc", "logging", "os", "random", "socket", "subprocess", "threading", "time", "zmq"}


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    return imports_of(sources_of(ROOT, [*sorted(set(ALLOWED) - {"protos"}), "benchmarks"]))


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
    # transformers probes for a package called `kernels`, and takes ours for the one on PyPI if ours has a version or
    # any of that package's names.
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
    # A new top-level package needs a place in the DAG or an exception here: docs/ and examples/ have users' programs,
    # clients/ how the client's distribution is built.
    tops = {Path(name(path)).parts[0] for path in files(".py") if path.parent != ROOT}
    assert tops <= OURS | {"clients", "scripts", "docs", "examples"}, sorted(tops - OURS)


def test_imports_go_down_inside_every_folder(imports: dict[str, set[str]]) -> None:
    for folder in {module.rpartition(".")[0] for module in imports} - {"", "benchmarks"}:
        floors_of(folder, imports)


def test_no_forbidden_import(imports: dict[str, set[str]]) -> None:
    known = set().union(*(parents(module) for module in imports))
    for folder, others in FORBIDDEN.items():
        assert {folder, *others} <= known, f"gone: {folder} or one of {others}"
    found = [
        f"{module} imports {target}"
        for folder, others in FORBIDDEN.items()
        for module, targets in imports.items()
        if folder in parents(module)
        for target in sorted(targets)
        if not parents(target).isdisjoint(others)
    ]
    assert not found, "\n".join(found)


def parents(module: str) -> set[str]:
    """A module and the folders around it."""
    names = module.split(".")
    return {".".join(names[:end]) for end in range(1, len(names) + 1)}


def test_no_modules_import_each_other(imports: dict[str, set[str]]) -> None:
    assert not circles(imports)


@pytest.mark.parametrize("package", DOORS)
def test_a_package_behind_a_door_is_imported_there_alone(package: str, imports: dict[str, set[str]]) -> None:
    found = {
        (module, target)
        for module, targets in imports.items()
        for target in targets
        if f"{target}.".startswith(f"{package}.") and not f"{module}.".startswith((f"{package}.", "benchmarks."))
    }
    assert found == {(DOORS[package], package)}


def test_a_folder_has_few_doors(imports: dict[str, set[str]]) -> None:
    folders = {module.rpartition(".")[0] for module in imports} - {""}
    crowded = {folder: len(entries_of(folder, imports)) for folder in folders}
    crowded = {folder: count for folder, count in crowded.items() if count > MOST_ENTRIES}
    assert not crowded


def test_the_scheduling_core_is_pure() -> None:
    found = [
        f"{name(path)} line {line}: {imported}"
        for path in files(".py", under=ROOT / "scheduler" / "core")
        for line, imported in imported_packages(path.read_text(), "scheduler")
        if imported in IMPURE
    ]
    assert not found, "\n".join(found)
    ours = imports_of(sources_of(ROOT, ["scheduler", "runtime"]))
    outside = {
        target
        for module, targets in ours.items()
        if module.startswith("scheduler.core")
        for target in targets
        if not target.startswith("scheduler.core")
    }
    assert outside <= {"runtime.block_hashes", "runtime.shares"}


def test_circles_are_found() -> None:
    # Guards this file: a reader that misses a form of import would let the floors rot.
    for source in (
        "import a.top.x",
        "from a.top import x",
        "from a.top.x import thing",
        "from a import top",
        "def f():\n    from a.top import x",
        "if TYPE_CHECKING:\n    import os\nelse:\n    from a.top import x",
    ):
        sources = {"a": "", "a.low": source, "a.beside": "", "a.top": "", "a.top.x": "from a import low"}
        found = imports_of(sources)
        with pytest.raises(ValueError, match=r"import each other: low, top$"):
            floors_of("a", found)
        assert circles(found) or source == "from a import top", source
    for_checkers = "if TYPE_CHECKING:\n    from a.top import x"
    assert floors_of("a", imports_of({"a.low": for_checkers, "a.top": "from a import low"})) == [{"low"}, {"top"}]
    downward = imports_of(
        {"a": "from a.top import x", "a.low": "import os", "a.top": "", "a.top.x": "from a import low"}
    )
    assert floors_of("a", downward) == [{"low"}, {"top"}]
    assert not circles(downward)
