"""constraints/*.txt resolve for each Python and each build of PyTorch. uv asks the index and downloads no package; all
ask at once, because they wait for it most of the time."""

import importlib.metadata
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.repository import ROOT

TORCH = "2.13.0"
PYTHONS = ("3.11", "3.12", "3.13")
# PyTorch pins the versions of its CUDA libraries itself.
CUDA_LIBRARIES = re.compile(r"(?:nvidia|cuda)-")
EXTRAS = ("dev", "plan", "tracing", "ray")


@pytest.fixture(scope="module")
def cpu_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel that has the metadata of PyTorch's CPU build, which PyPI lacks, but no code."""
    folder = tmp_path_factory.mktemp("wheels")
    needs = [
        f"Requires-Dist: {requirement}"
        for requirement in importlib.metadata.requires("torch") or ()
        if not CUDA_LIBRARIES.match(requirement) and not requirement.startswith("triton")
    ]
    metadata = "\n".join(["Metadata-Version: 2.1", "Name: torch", f"Version: {TORCH}+cpu", *needs, ""])
    with zipfile.ZipFile(folder / f"torch-{TORCH}+cpu-py3-none-any.whl", "w") as wheel:
        info = f"torch-{TORCH}+cpu.dist-info"
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return folder


def resolve(constraints: str, python: str, *arguments: str) -> dict[str, str]:
    """The versions that a Linux machine would get, by package."""
    command = [
        *(sys.executable, "-m", "uv", "pip", "compile", "--no-config", "--quiet", "--no-header", "--no-annotate"),
        *("--python-platform", "x86_64-manylinux_2_28", "--python-version", python),
        *("--constraint", f"constraints/{constraints}.txt", *(f"--extra={extra}" for extra in EXTRAS)),
        *(*arguments, "pyproject.toml"),
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    if "error sending request" in result.stderr:
        pytest.skip(f"no package index can be reached: {result.stderr.splitlines()[0]}")
    assert result.returncode == 0, result.stderr
    pairs = (line.partition("==") for line in result.stdout.splitlines() if line)
    return {re.sub(r"[._]", "-", name).lower(): version for name, _, version in pairs}


def pinned(constraints: str) -> dict[str, str]:
    text = "".join((ROOT / f"constraints/{name}.txt").read_text() for name in (constraints, "common"))
    pairs = (line.partition("==") for line in text.splitlines() if re.match(r"[\w.-]+==", line))
    return {re.sub(r"[._]", "-", name).lower(): version.partition(",")[0] for name, _, version in pairs}


Found = Callable[[str, str], dict[str, str]]


@pytest.fixture(scope="module")
def found_versions(cpu_build: Path) -> Iterator[Found]:
    """Waits for what `resolve` gives for constraints and a Python, each for its own build of PyTorch."""
    with ThreadPoolExecutor() as executor:
        futures = {("cuda", python): executor.submit(resolve, "cuda", python) for python in PYTHONS} | {
            ("cpu", python): executor.submit(resolve, "cpu", python, f"--find-links={cpu_build}") for python in PYTHONS
        }
        yield lambda constraints, python: futures[constraints, python].result()


@pytest.mark.parametrize("python", PYTHONS)
def test_with_pytorchs_cuda_build(python: str, found_versions: Found) -> None:
    found = found_versions("cuda", python)
    assert found["torch"] == TORCH
    assert any(CUDA_LIBRARIES.match(name) for name in found)
    wanted = pinned("cuda")
    assert {name: version for name, version in found.items() if not CUDA_LIBRARIES.match(name)} == {
        name: wanted.get(name, "not pinned") for name in found if not CUDA_LIBRARIES.match(name)
    }


@pytest.mark.parametrize("python", PYTHONS)
def test_with_pytorchs_cpu_build(python: str, found_versions: Found) -> None:
    found = found_versions("cpu", python)
    wanted = pinned("cpu") | {"torch": f"{TORCH}+cpu"}
    assert found == {name: wanted.get(name, "not pinned") for name in found}


def test_the_versions_for_cpus_do_not_fit_the_cuda_build() -> None:
    """If they did, one file would be enough."""
    with pytest.raises(AssertionError, match="triton"):
        resolve("cpu", "3.11")
