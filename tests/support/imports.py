"""Reads from the sources which of our modules import which; executes nothing."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tests.support.repository import files, is_generated

# module -> source, as "worker.gpu.engine" -> "import torch\n...". A package stands for its __init__.py.
Sources = Mapping[str, str]
# module -> the modules of ours that it imports, at its top, in functions, or for type checkers.
Imports = Mapping[str, set[str]]


def sources_of(root: Path, packages: Iterable[str]) -> dict[str, str]:
    """The modules of these packages, without generated ones."""
    found: dict[str, str] = {}
    for package in packages:
        for path in files(".py", under=root / package):
            if not is_generated(path):
                parts = path.relative_to(root).with_suffix("").parts
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


def imports_of(sources: Sources) -> dict[str, set[str]]:
    """`from a import b` imports the module a.b if there is one, otherwise a."""
    return {module: set(_imported(text, sources)) - {module} for module, text in sources.items()}


def _imported(text: str, known: Sources) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.ImportFrom(module=str(module), level=0):
                for alias in node.names:
                    name = f"{module}.{alias.name}" if f"{module}.{alias.name}" in known else module
                    if name in known:
                        yield name
            case ast.Import(names=names):
                yield from (alias.name for alias in names if alias.name in known)


def circles(imports: Imports) -> set[str]:
    """Modules that import each other, directly or through others, and those on a path from one circle to another."""
    left = {module: set(targets) for module, targets in imports.items()}
    while left:
        imported = set[str]().union(*left.values())
        ends = {module for module, targets in left.items() if module not in imported or not targets & left.keys()}
        if not ends:
            break
        for module in ends:
            del left[module]
    return set(left)


def entries_of(folder: str, modules: Iterable[str]) -> set[str]:
    """The files and folders in a folder, without __init__.py."""
    return {module[len(folder) + 1 :].split(".")[0] for module in modules if module.startswith(f"{folder}.")}


def upward(folder: str, floors: str, imports: Imports) -> list[str]:
    """Imports among a folder's entries that don't go to a lower floor.

    floors: "a b < c": floors from bottom to top, each a list of entries. The folder's own __init__.py is above all.
    """
    height = {entry: level for level, floor in enumerate(floors.split("<")) for entry in floor.split()}
    found = []
    for module, targets in imports.items():
        if not module.startswith(f"{folder}."):
            continue
        entry = module[len(folder) + 1 :].split(".")[0]
        for target in sorted(targets):
            if target == folder:
                found.append(f"{module} imports its own package {folder}")
            elif target.startswith(f"{folder}."):
                other = target[len(folder) + 1 :].split(".")[0]
                if other != entry and height.get(other, -1) >= height.get(entry, -1):
                    found.append(f"{module} imports {target}: {other} is not below {entry}")
    return found
