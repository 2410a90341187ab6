"""Makes an environment for each client, and keeps it for the next run."""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.clients.catalogue import PROGRAMS, Client
from benchmarks.cluster.up import ROOT

_INSTALL_VLLM = ROOT / "benchmarks" / "peers" / "install_vllm.sh"
_INSTALL_S = 1800
_SHORT_S = 60


@dataclass(frozen=True)
class Environment:
    """Where a client is installed. command: runs its program; takes the case as a further argument."""

    command: tuple[str, ...]
    version: str


class LackingError(Exception):
    """The machine or its package registries lack what a client needs."""


def prepare(client: Client, directory: Path) -> Environment:
    """Installs the client in `directory`, unless the packages that it needs are there already.

    Raises LackingError with the end of the installer's output.
    """
    wanted, installed = "\n".join(client.packages), directory / "installed"
    if not installed.exists() or installed.read_text() != wanted:
        print(f"installing {client.title} in {directory}", file=sys.stderr, flush=True)
        directory.mkdir(parents=True, exist_ok=True)
        _INSTALLERS[client.kind](client, directory)
        installed.write_text(wanted)
    if client.kind != "npm":
        python = _python(client, directory)
        question = f"import importlib.metadata as m; print(m.version({client.shown_package!r}))"
        version = subprocess.check_output([python, "-c", question], text=True, timeout=_SHORT_S).strip()
        return Environment((str(python), str(PROGRAMS / client.program)), version)
    # Programs of Node look for their packages beside themselves.
    for program in PROGRAMS.glob("*.mjs"):
        shutil.copy(program, directory)
    package = json.loads((directory / "node_modules" / client.shown_package / "package.json").read_text())
    node = directory / "node_modules" / ".bin" / "node"
    return Environment((str(node), str(directory / client.program)), package["version"])


def _python(client: Client, directory: Path) -> Path:
    return directory / ("bin" if client.kind == "vllm" else "venv/bin") / "python"


def _pip(client: Client, directory: Path) -> None:
    _run(sys.executable, "-m", "venv", "--clear", directory / "venv")
    _run(_python(client, directory), "-m", "pip", "install", "--quiet", *client.packages)


def _npm(client: Client, directory: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise LackingError("npm is not installed")
    (directory / "package.json").write_text('{"private": true}')
    _run(npm, "install", "--no-audit", "--no-fund", *client.packages, directory=directory)


def _vllm(client: Client, directory: Path) -> None:
    _run("sh", _INSTALL_VLLM, directory)


_INSTALLERS = {"pip": _pip, "npm": _npm, "vllm": _vllm}


def _run(*command: object, directory: Path | None = None) -> None:
    try:
        done = subprocess.run(
            [str(part) for part in command], cwd=directory, capture_output=True, text=True, timeout=_INSTALL_S
        )
    except (subprocess.TimeoutExpired, OSError) as error:
        raise LackingError(str(error)) from error
    if done.returncode:
        raise LackingError(f"{command[0]} ended with {done.returncode}: {(done.stdout + done.stderr).strip()[-600:]}")
