"""`octavo doctor` as users type it, and what `octavo up` shows of it when it fails."""

import json
import socket
import subprocess
from pathlib import Path

from tests.support.models.tiny_model import make_tiny_model
from tests.support.ports import free_port
from tests.support.up import COMMAND, Up, environment


def doctor(*flags: str, **extra: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit code and lines of `octavo doctor --json`; of a subject with several, the last."""
    result = subprocess.run(
        [*COMMAND, "doctor", "--json", *flags],
        env=environment(**extra),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert lines, result.stderr
    return result.returncode, {line["subject"]: line for line in lines}


def test_a_port_in_use_makes_the_command_fail(tmp_path: Path) -> None:
    flags = ("--http-port=0", "--metrics-port=0", f"--runtime-dir={tmp_path / 'runtime'}")
    with socket.create_server(("127.0.0.1", 0)) as server:
        code, lines = doctor(f"--port={server.getsockname()[1]}", *flags)
    assert code == 1
    assert {name for name, line in lines.items() if line["state"] == "problem"} == {"ports"}
    assert set(lines["ports"]) == {"subject", "state", "found", "advice"}
    code, lines = doctor(f"--port={free_port()}", *flags)
    assert code == 0
    assert lines["PyTorch"]["state"] == "ok"


def test_up_that_fails_shows_the_problem_that_fits(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    with Up(tmp_path, f"--model={model}", "--kv-cache-memory=0.000001", real=True) as up:
        assert up.process.wait(120) == 1
    said = up.output[up.output.index("`octavo doctor` finds on this machine:") :]
    assert "KV cache: kv_cache_memory=1e-06 GiB holds no KV block" in said
    assert "to do: use kv_cache_memory=" in said


def test_up_that_cannot_start_names_doctor(tmp_path: Path) -> None:
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime").chmod(0o755)
    with Up(tmp_path) as up:
        assert up.process.wait(60) == 1
    assert "is open to others" in up.output
    assert "`octavo doctor` with the same options checks this machine" in up.output
