"""The text that `octavo up` prints once the cluster serves."""

import sys
from pathlib import Path

import pytest

from configs.options import Options
from octavo.cluster.welcome import command, how_to_call


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    script = tmp_path / "env" / "bin" / "octavo"
    script.parent.mkdir(parents=True)
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script.with_name("python")))
    monkeypatch.setenv("PATH", "")
    return script


def test_the_command_is_a_path_from_here(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert command() == "env/bin/octavo"
    assert '  env/bin/octavo chat "What' in how_to_call(Options(port=50051))


def test_from_elsewhere_it_is_the_whole_path(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert command() == str(script)


def test_where_the_shell_finds_it_it_is_its_name(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(script.parent))
    assert command() == "octavo"


def test_the_console_is_named_where_it_is_served() -> None:
    assert "console   http://127.0.0.1:8123/console" in how_to_call(Options(http_port=8123, console=True))
    for options in (Options(http_port=8123), Options(http_port=0, console=True)):
        assert "console" not in how_to_call(options)
