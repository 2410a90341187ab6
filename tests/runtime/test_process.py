"""runtime.process and runtime.security.curve: private files stay private; children do not outlive their parent."""

import contextlib
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zmq

from runtime.process import private_directory, seconds_alive
from runtime.security.curve import CurveError, client_curve, make_keys, server_curve, start_authenticator
from tests.support.repository import ROOT

CHILD = ROOT / "octavo" / "cluster" / "child.py"
PARENT = """
import os, subprocess, sys
program = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
tied = [sys.executable, "-I", "-S", sys.argv[1], str(os.getpid()), "15", *program]
child = subprocess.Popen(tied, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_private_directory_refuses_an_open_one(tmp_path: Path):
    made = private_directory(tmp_path / "a" / "run")
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    made.chmod(0o755)
    with pytest.raises(PermissionError, match="open to others"):
        private_directory(made)


def test_a_process_knows_its_age_interpreter_and_imports_included():
    code = "import time; time.sleep(0.3); from runtime.process import seconds_alive; print(seconds_alive())"
    before = time.monotonic()
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    # Ticks are 10 ms.
    assert 0.29 < float(said) < time.monotonic() - before + 0.02
    assert seconds_alive() > 0.0


def test_a_child_ends_when_its_parent_is_killed():
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(CHILD)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdin is not None
    child = int(parent.stdout.readline())
    descriptor = os.pidfd_open(child)
    parent.send_signal(signal.SIGKILL)
    parent.wait(10)
    try:
        poller = zmq.Poller()
        poller.register(descriptor, zmq.POLLIN)
        assert poller.poll(10_000), "the child outlived its parent"
    finally:
        os.close(descriptor)
        parent.stdin.close()
        parent.stdout.close()


def test_curve_keys_admit_listed_workers_only(tmp_path: Path):
    make_keys(tmp_path / "keys")
    make_keys(tmp_path / "strangers")
    (tmp_path / "strangers" / "scheduler.key").write_bytes((tmp_path / "keys" / "scheduler.key").read_bytes())
    context = zmq.Context()
    authenticator = start_authenticator(context, tmp_path / "keys")
    server = context.socket(zmq.ROUTER)
    server_curve(server, tmp_path / "keys")
    port = server.bind_to_random_port("tcp://127.0.0.1")
    clients = []
    for directory in ("strangers", "keys"):
        client = context.socket(zmq.DEALER)
        client.linger = 0
        client_curve(client, tmp_path / directory)
        client.connect(f"tcp://127.0.0.1:{port}")
        clients.append(client)
        # A client that has already been refused has no peer to send to.
        with contextlib.suppress(zmq.Again):
            client.send(directory.encode(), zmq.NOBLOCK)
    try:
        assert server.poll(5000)
        assert server.recv_multipart()[1] == b"keys"
        assert not server.poll(300), "a worker that is not on the allow-list got through"
    finally:
        for client in clients:
            client.close()
        server.close(linger=0)
        authenticator.stop()
        context.term()


def test_keys_are_not_overwritten_and_missing_ones_are_named(tmp_path: Path):
    make_keys(tmp_path)
    assert stat.S_IMODE((tmp_path / "scheduler.key_secret").stat().st_mode) == 0o600
    with pytest.raises(CurveError, match="holds keys already"):
        make_keys(tmp_path)
    with pytest.raises(CurveError, match="octavo keys"):
        start_authenticator(zmq.Context.instance(), tmp_path / "none")
