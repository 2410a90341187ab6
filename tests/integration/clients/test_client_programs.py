"""docs/clients: each program streams, continues at another router when its own stops, and gets the same text; it tries
again when a full router refuses it. Those with tools make a round trip: calls, results, an answer. Those with images
send a file.

benchmarks/cluster/foreign_clients.py runs the programs that need more than this environment and npm.
"""

import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import pytest

from tests.support.client_programs import CLIENTS, check_calls, check_images, check_resumes, check_waits
from tests.support.repository import ROOT

_INSTALL_S, _COMPILE_S = 20, 180
Check = Callable[[Path, Sequence[object], Mapping[str, str]], Awaitable[None]]


@pytest.mark.parametrize("check", [check_resumes, check_waits])
@pytest.mark.parametrize("name", ["with_octavo", "from_proto"])
async def test_python(tmp_path: Path, name: str, check: Check) -> None:
    await check(tmp_path, [sys.executable, CLIENTS / "python" / f"{name}.py"], {"PYTHONPATH": str(ROOT)})


async def test_python_calls_a_tool(tmp_path: Path) -> None:
    await check_calls(tmp_path, [sys.executable, CLIENTS / "python" / "with_tools.py"], {"PYTHONPATH": str(ROOT)})


async def test_python_sends_an_image(tmp_path: Path) -> None:
    await check_images(tmp_path, [sys.executable, CLIENTS / "python" / "with_image.py"], {"PYTHONPATH": str(ROOT)})


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The command and a folder with the packages that the program needs."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None:
        pytest.skip("node is not installed")
    program = CLIENTS / "node" / "client.js"
    for each in (program, program.with_name("with_tools.js"), program.with_name("with_image.js")):
        subprocess.run([node, "--check", each], check=True, timeout=20)
    if npm is None:
        pytest.skip("npm is not installed; the program's syntax is right")
    directory = tmp_path_factory.mktemp("node")
    shutil.copy(program.with_name("package.json"), directory)
    install = [npm, "install", "--prefer-offline", "--no-audit", "--no-fund"]
    try:
        subprocess.run(install, cwd=directory, check=True, capture_output=True, timeout=_INSTALL_S)
    except subprocess.SubprocessError as error:
        pytest.skip(f"npm can't install @grpc/grpc-js: {error}; the program's syntax is right")
    return node, directory / "node_modules"


@pytest.mark.parametrize("check", [check_resumes, check_waits])
async def test_node(tmp_path: Path, node: tuple[str, Path], check: Check) -> None:
    command, packages = node
    await check(tmp_path, [command, CLIENTS / "node" / "client.js"], {"NODE_PATH": str(packages)})


async def test_node_calls_a_tool(tmp_path: Path, node: tuple[str, Path]) -> None:
    command, packages = node
    await check_calls(tmp_path, [command, CLIENTS / "node" / "with_tools.js"], {"NODE_PATH": str(packages)})


async def test_node_sends_an_image(tmp_path: Path, node: tuple[str, Path]) -> None:
    command, packages = node
    await check_images(tmp_path, [command, CLIENTS / "node" / "with_image.js"], {"NODE_PATH": str(packages)})


@pytest.fixture(scope="module")
def cpp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the programs, compiled."""
    if lacking := [
        tool for tool in ("make", "g++", "pkg-config", "protoc", "grpc_cpp_plugin") if not shutil.which(tool)
    ]:
        pytest.skip(f"{', '.join(lacking)} not installed")
    directory = tmp_path_factory.mktemp("cpp")
    make = ["make", "-C", CLIENTS / "cpp", f"BUILD={directory}"]
    subprocess.run(make, check=True, capture_output=True, timeout=_COMPILE_S)
    return directory


@pytest.mark.parametrize("check", [check_resumes, check_waits])
async def test_cpp(tmp_path: Path, cpp: Path, check: Check) -> None:
    await check(tmp_path, [cpp / "client"], {})


async def test_cpp_calls_a_tool(tmp_path: Path, cpp: Path) -> None:
    await check_calls(tmp_path, [cpp / "with_tools"], {})


async def test_cpp_sends_an_image(tmp_path: Path, cpp: Path) -> None:
    await check_images(tmp_path, [cpp / "with_image"], {})
