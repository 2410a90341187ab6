"""Reads from the sources which of our modules import which; executes nothing.

python -m tests.support.imports router.api     prints the folder's floors: an entry imports what is below it
"""

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tests.support.repository import ROOT, files, is_generated

# module -> source, as "worker.gpu.engine" -> "import torch\n...". A package stands for its __init__.py.
Sources = Mapping[str, str]
# module -> the modules of ours that it imports, at its top or in functions.
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
    """`from a import b` imports the module a.b if there is one, otherwise a.

    What only type checkers import does not count: a module that names the class above it, which calls it, does not need
    it to run, and a protocol with one implementation would say the same twice.
    """
    return {module: set(_imported(text, sources)) - {module} for module, text in sources.items()}


def _imported(text: str, known: Sources) -> Iterator[str]:
    for node in _executed(ast.parse(text)):
        match node:
            case ast.ImportFrom(module=str(module), level=0):
                for alias in node.names:
                    name = f"{module}.{alias.name}" if f"{module}.{alias.name}" in known else module
                    if name in known:
                        yield name
            case ast.Import(names=names):
                yield from (alias.name for alias in names if alias.name in known)


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below a node, without those under `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        yield child
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for other in child.orelse:
                yield other
                yield from _executed(other)
        else:
            yield from _executed(child)


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


def floors_of(folder: str, imports: Imports) -> list[set[str]]:
    """The order in which a newcomer can read a folder: an entry imports what stands on lower floors, the first ones.

    Raises ValueError if entries import each other, directly or through others of the folder.
    """
    own = {entry: set[str]() for entry in entries_of(folder, imports)}
    for module, targets in imports.items():
        if module.startswith(f"{folder}."):
            (entry,) = entries_of(folder, [module])
            own[entry] |= entries_of(folder, targets) - {entry}
    floors: list[set[str]] = []
    while own:
        floor = {entry for entry, others in own.items() if not others & own.keys()}
        if not floor:
            raise ValueError(f"entries of {folder} import each other: {', '.join(sorted(circles(own)))}")
        floors.append(floor)
        own = {entry: others for entry, others in own.items() if entry not in floor}
    return floors


def main() -> None:
    """Prints the floors of folders, such as router.api, from bottom to top."""
    for folder in sys.argv[1:]:
        print(f"{folder}:", " < ".join(" ".join(sorted(floor)) for floor in floors_of(folder, _ours(folder))))


def _ours(folder: str) -> Imports:
    return imports_of(sources_of(ROOT, [folder.partition(".")[0]]))


if __name__ == "__main__":
    main()
