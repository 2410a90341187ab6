"""Builds the distributions octavo and octavo-client, which share one package, `octavo`.

In the repository the packages lie side by side. Installed like that, names such as `kernels` and `router` would meet
those of other distributions: pip overwrites their files without a word, and deletes them with ours. So all packages
move into `octavo`, and what names them is rewritten: imports, and in protobuf's code the names of modules and .proto
files. No other string names a module: those that `python -m` runs derive from `__name__` or `__package__`.

octavo-client owns octavo/__init__.py, octavo/client and what these import from other packages; octavo owns all other
files, and requires it.
"""

import ast
import shutil
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from pathspec import GitIgnoreSpec

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parents[1]

# A line, from 1, a first and a last byte in it, and the text for what is between.
_Edit = tuple[int, int, int, str]


class OnePackage(BuildHookInterface):
    """Gives hatchling the files of a wheel, or of the client's source distribution."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        is_client = Path(self.root).resolve() == _HERE
        # An editable installation uses the repository's folders. The client's source distribution has the files.
        if version == "editable" or (is_client and (_HERE / "PKG-INFO").exists()):
            return
        files = repository_files()
        of_client = client_files(files)
        # Removed with the hook.
        self._directory = TemporaryDirectory()
        for file in of_client if is_client else files - of_client:
            write(file, Path(self._directory.name))
        build_data["force_include"][f"{self._directory.name}/octavo"] = "octavo"
        if not is_client:
            build_data["dependencies"].append(f"octavo-client=={self.metadata.version}")
        elif self.target_name == "sdist":
            build_data["force_include"][f"{_ROOT}/LICENSE"] = "LICENSE"


@cache
def packages() -> tuple[str, ...]:
    """Returns the packages that are installed, by their names in the repository."""
    targets = tomllib.loads((_ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    return tuple(targets["wheel"]["hooks"]["custom"]["packages"])


def repository_files() -> set[Path]:
    """Returns the files of all packages, from the repository's root, without those that Git ignores."""
    ignored = GitIgnoreSpec.from_lines((_ROOT / ".gitignore").read_text().splitlines())
    paths = (path for package in packages() for path in (_ROOT / package).rglob("*") if path.is_file())
    return {path for path in (each.relative_to(_ROOT) for each in paths) if not ignored.match_file(path)}


@cache
def proto_files() -> tuple[str, ...]:
    """Returns the .proto files as they name each other, from the repository's root."""
    return tuple(path.as_posix() for path in sorted(repository_files()) if path.suffix == ".proto")


def client_files(files: set[Path]) -> set[Path]:
    """Returns those of the files that octavo-client owns."""
    waiting = {file for file in files if file.parts[:2] in (("octavo", "__init__.py"), ("octavo", "client"))}
    found = set[Path]()
    while waiting:
        found.add(file := waiting.pop())
        if file.suffix == ".py":
            for module in _imported(ast.parse((_ROOT / file).read_bytes())):
                waiting |= (files & set(_places(module))) - found
    return found


def write(file: Path, directory: Path) -> None:
    """Writes a file of the repository to its place in the package `octavo` below `directory`."""
    target = directory / (Path("octavo", file) if _moves(file.parts[0]) else file)
    target.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix in (".py", ".pyi"):
        target.write_bytes(rewritten((_ROOT / file).read_bytes(), is_generated="_pb2" in file.name))
    elif file.suffix == ".proto":
        text = (_ROOT / file).read_bytes()
        for name in proto_files():
            text = text.replace(f'import "{name}"'.encode(), f'import "octavo/{name}"'.encode())
        target.write_bytes(text)
    else:
        shutil.copyfile(_ROOT / file, target)


def rewritten(source: bytes, *, is_generated: bool = False) -> bytes:
    """Returns Python source that names the packages below `octavo`. is_generated: by protobuf's compiler."""
    tree = ast.parse(source)
    edits = [*_import_edits(tree), *(_generated_edits(tree) if is_generated else ())]
    lines = source.splitlines(keepends=True)
    for line, begin, end, text in sorted(edits, reverse=True):
        lines[line - 1] = lines[line - 1][:begin] + text.encode() + lines[line - 1][end:]
    return b"".join(lines)


def _moves(module: str) -> bool:
    """True for a module of the packages that lie below `octavo` once they are installed."""
    package = module.partition(".")[0]
    return package != "octavo" and package in packages()


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yields the modules of such packages that a file imports, and the names in them, which may be modules, too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and _moves(node.module or ""):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _moves(alias.name))


def _places(module: str) -> Iterator[Path]:
    """Yields the places where a module, its stub and the packages around it may lie."""
    path = Path(*module.split("."))
    for each in (path, *path.parents[:-1]):
        yield from (each.with_suffix(".py"), each.with_suffix(".pyi"), each / "__init__.py")


def _import_edits(tree: ast.Module) -> Iterator[_Edit]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and _moves(node.module or ""):
            begin = node.col_offset + len("from ")
            yield node.lineno, begin, begin, "octavo."
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if _moves(alias.name):
                    yield alias.lineno, alias.col_offset, alias.col_offset, "octavo."
                    if alias.asname is None:
                        # `import a.b` binds a.
                        package, _, submodule = alias.name.partition(".")
                        binding = f", octavo.{package} as {package}" if submodule else f" as {package}"
                        yield alias.lineno, alias.end_col_offset or 0, alias.end_col_offset or 0, binding


def _generated_edits(tree: ast.Module) -> Iterator[_Edit]:
    """Renames modules and .proto files, in strings and in the serialized descriptor, and corrects offsets into that."""
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    for node in constants:
        if isinstance(node.value, str) and _moves(node.value.replace("/", ".")):
            yield _replaced(node, f"octavo{'/' if '/' in node.value else '.'}{node.value}")
    num_added = 0
    for node in constants:
        if isinstance(node.value, bytes) and (descriptor := _renamed(node.value)) != node.value:
            # The names stand before all messages.
            num_added = len(descriptor) - len(node.value)
            yield _replaced(node, descriptor)
    for node in ast.walk(tree):
        match node:
            case ast.Assign(
                targets=[ast.Attribute(attr="_serialized_start" | "_serialized_end")],
                value=ast.Constant(value=int(offset)) as constant,
            ):
                yield _replaced(constant, offset + num_added)


def _renamed(descriptor: bytes) -> bytes:
    """Renames the .proto files in a serialized FileDescriptorProto: its own, and those that it imports."""
    for name in proto_files():
        descriptor = descriptor.replace(_field(name), _field(f"octavo/{name}"))
    return descriptor


def _field(text: str) -> bytes:
    assert len(text) < 128, "its length would take two bytes"
    return bytes([len(text)]) + text.encode()


def _replaced(node: ast.Constant, value: str | bytes | int) -> _Edit:
    assert node.lineno == node.end_lineno, "it is on one line"
    return node.lineno, node.col_offset, node.end_col_offset or 0, repr(value)
