"""`octavo up` with stand-ins for the processes: it starts, restarts, drains and ends as it must."""

import socket
import stat
from pathlib import Path

import psutil
import pytest
import yaml

from tests.support.ports import free_port
from tests.support.up import Up


def test_it_answers_the_first_prompt_says_how_to_call_and_drains_in_order(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    flags = ("--data-parallel-size=2", "--first-prompt=Capital of France?")
    with Up(tmp_path, *flags, FAKE_JOURNAL=str(journal)) as up:
        up.wait_until_serving(num_processes=5)
        assert "> Capital of France?" in up.output
        assert "Paris, of course" in up.output
        for words in ("octavo chat", f'Client("127.0.0.1:{up.port}")', "grpcurl -plaintext"):
            assert words in up.output
        assert len(up.children()) == 5
        up.interrupt()
        assert up.wait() == 0
    assert journal.read_text().split() == ["router", "scheduler", "scheduler", "worker", "worker"]


def test_flags_win_over_the_environment_in_the_processes_too(tmp_path: Path) -> None:
    with Up(tmp_path, "--max_num_seqs=7", OCTAVO_MAX_NUM_SEQS="9", OCTAVO_BLOCK_SIZE="32") as up:
        up.wait_until_serving()
        assert "worker 0 max_num_seqs=7" in up.output
        written = up.runtime_dir / "options.yaml"
        assert yaml.safe_load(written.read_text())["block_size"] == 32
        assert stat.S_IMODE(written.stat().st_mode) == 0o600


@pytest.mark.parametrize("kind", ["worker", "scheduler", "router"])
def test_a_killed_process_is_started_again(tmp_path: Path, kind: str) -> None:
    with Up(tmp_path) as up:
        up.wait_until_serving()
        killed = up.child(kind)
        killed.kill()
        up.wait_for("was killed by SIGKILL; starting it again")
        up.wait_for(f"{kind} 0 max_num_seqs=", count=2)
        assert up.child(kind).pid != killed.pid


def test_kill_9_of_the_launcher_leaves_no_orphan(tmp_path: Path) -> None:
    with Up(tmp_path, "--data-parallel-size=2") as up:
        up.wait_until_serving(num_processes=5)
        children = up.children()
        up.process.kill()
        _, alive = psutil.wait_procs(children, timeout=30)
        assert not alive


def test_a_permanent_failure_ends_it_with_the_cause(tmp_path: Path) -> None:
    with Up(tmp_path, FAKE_WORKER="permanent") as up:
        assert up.wait() == 1
        assert "worker 0.0 ended with exit code 2" in up.output
        assert up.output.count("the weights are corrupt") >= 2, "the cause must be logged at once and at the end"
        assert "Traceback" not in up.output
        assert "starting it again" not in up.output


def test_a_process_that_keeps_dying_ends_it_with_the_cause(tmp_path: Path) -> None:
    with Up(tmp_path, "--max-restarts=1", FAKE_SCHEDULER="crash") as up:
        assert up.wait() == 1
        assert up.output.count("scheduler 0 ended with exit code 1; starting it again") == 1
        assert "It was started again 1 times within 60 s (max_restarts=1)" in up.output
        assert up.output.rindex("out of luck") > up.output.index("starting it again")


def test_a_second_interrupt_ends_what_ignores_the_first(tmp_path: Path) -> None:
    with Up(tmp_path, FAKE_ROUTER="stubborn") as up:
        up.wait_until_serving()
        children = up.children()
        up.interrupt()
        up.wait_for("Stopping")
        up.interrupt()
        assert up.wait() == 130
        assert not psutil.wait_procs(children, timeout=30)[1]


def test_a_second_cluster_in_the_same_directory_is_refused_with_the_pid(tmp_path: Path) -> None:
    with Up(tmp_path) as first:
        first.wait_until_serving()
        with Up(tmp_path, runtime_dir=first.runtime_dir) as second:
            assert second.wait() == 1
            assert f"in use by another `octavo up` (pid {first.process.pid})" in second.output
            assert "--runtime-dir" in second.output


def test_a_directory_open_to_others_is_refused(tmp_path: Path) -> None:
    open_directory = tmp_path / "open"
    open_directory.mkdir(mode=0o755)
    open_directory.chmod(0o755)
    with Up(tmp_path, runtime_dir=open_directory) as up:
        assert up.wait() == 1
        assert "is open to others (mode 755)" in up.output
        assert "Traceback" not in up.output


def test_a_port_in_use_is_named_with_one_that_would_work(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with Up(tmp_path, port=port) as up:
            assert up.wait() == 1
            assert f"port={port}: port {port} of 127.0.0.1 is in use" in up.output
            assert "--port, such as" in up.output


def test_a_metrics_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        # The scheduler's port is one above the option's value.
        port = taken.getsockname()[1]
        with Up(tmp_path, f"--metrics-port={port - 1}") as up:
            assert up.wait() == 1
            assert f"metrics_port={port - 1}: port {port} of" in up.output


def test_port_0_takes_a_free_one(tmp_path: Path) -> None:
    with Up(tmp_path, "--port=0") as up:
        up.wait_until_serving()
        target = up.wait_for("gRPC ").split()[-1]
        assert int(target.rpartition(":")[2]) > 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--max-num-seqs=0",), "max_num_seqs='0' as a flag"),
        (("--model=nowhere.gguf",), "model='nowhere.gguf': no such file"),
        (("-c", "nowhere.yaml"), "cannot read the configuration nowhere.yaml"),
    ],
)
def test_what_cannot_work_is_one_message_and_exit_code_2(tmp_path: Path, flags: tuple[str, ...], words: str) -> None:
    with Up(tmp_path, *flags, port=free_port()) as up:
        assert up.wait() == 2
        assert words in up.output
        assert "Traceback" not in up.output
