"""The wheels of octavo and octavo-client, built of the repository."""

import subprocess
import sys
from pathlib import Path

from tests.support.repository import ROOT

OCTAVO, CLIENT = ROOT, ROOT / "clients/python"


def build_wheels(directory: Path, *projects: Path) -> list[Path]:
    """Builds the wheels of projects in a directory, with what the environment has."""
    for project in projects:
        pip("wheel", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", directory, project)
    return [next(directory.glob(f"octavo{'_client' * (project == CLIENT)}-*.whl")) for project in projects]


def pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
