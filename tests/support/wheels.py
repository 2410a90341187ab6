"""Builds the wheels of octavo and octavo-client, with what the environment has."""

import subprocess
import sys
from pathlib import Path

from tests.support.repository import ROOT

CLIENT = ROOT / "clients/python"


def build_wheel(project: Path, directory: Path) -> Path:
    """Builds the wheel of a folder or a source distribution in an empty directory."""
    pip("wheel", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", directory, project)
    (wheel,) = directory.glob("*.whl")
    return wheel


def pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
