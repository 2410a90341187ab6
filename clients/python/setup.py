"""Makes the distribution octavo-client of the sources in octavo/client, which are nowhere else.

The package is `octavo` with the client alone. What the client imports from Octavo's other packages, messages and
constants, goes into a package `shared` in it, because names such as `protos` and `configs` belong to the user's own
program. A source distribution contains the sources in that form, in a folder src.
"""

import re
import shutil
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

_HERE = Path(__file__).resolve().parent
_REPOSITORY = _HERE.parents[1]
# In a source distribution.
_COLLECTED = _HERE / "src"

_SHARED = "octavo.client.shared"
_IMPORT = re.compile(r"^(?P<before>\s*(?:from|import) )(?P<module>(?:protos|configs|runtime)[\w.]*)(?P<after>.*)", re.M)
_NAME = re.compile(r"\w+")


def collect(target: Path) -> None:
    """Writes the package into the folder `target`."""
    if _COLLECTED.is_dir():
        shutil.copytree(_COLLECTED, target, dirs_exist_ok=True)
        return
    waiting = [Path("octavo/__init__.py"), *(Path("octavo/client", each.name) for each in _sources())]
    seen = set[Path]()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        text = (_REPOSITORY / path).read_text()
        for found in _IMPORT.finditer(text):
            waiting += _imported(found["module"], found["after"])
        to = target / (path if path.parts[0] == "octavo" else Path(*_SHARED.split("."), path))
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text(_IMPORT.sub(rf"\g<before>{_SHARED}.\g<module>\g<after>", text))
    (target / Path(*_SHARED.split(".")) / "__init__.py").touch()
    (target / "octavo/client/py.typed").touch()


def _sources() -> list[Path]:
    return sorted((_REPOSITORY / "octavo/client").glob("*.py"))


def _imported(module: str, after: str) -> list[Path]:
    """Returns the files that an import statement reads; `after`: the rest of its line."""
    place = Path(*module.split("."))
    names = [place] + [place / name for name in _NAME.findall(after)]
    found = [each.with_suffix(suffix) for each in names for suffix in (".py", ".pyi")]
    found += [folder / "__init__.py" for each in names for folder in (each, *each.parents)]
    return [path for path in found if path.parts[0] != "__init__.py" and (_REPOSITORY / path).is_file()]


class _Build(build_py):
    def run(self) -> None:
        collect(Path(self.build_lib))

    def get_source_files(self) -> list[str]:
        return []

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [str(path) for path in Path(self.build_lib).rglob("*") if path.is_file()]


class _Sdist(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        collect(Path(base_dir, "src"))
        Path(base_dir, "VERSION").write_text(_version())
        shutil.copyfile(_license(), Path(base_dir, "LICENSE"))


def _version() -> str:
    if (own := _HERE / "VERSION").is_file():
        return own.read_text().strip()
    return tomllib.loads((_REPOSITORY / "pyproject.toml").read_text())["project"]["version"]


def _license() -> Path:
    return _HERE / "LICENSE" if _COLLECTED.is_dir() else _REPOSITORY / "LICENSE"


setup(version=_version(), packages=["octavo"], cmdclass={"build_py": _Build, "sdist": _Sdist})
