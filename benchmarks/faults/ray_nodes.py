"""Removes a node of a Ray cluster while streams run, and shows what becomes of them.

    python -m benchmarks.faults.ray_nodes [--streams 8] [--tokens 600] [--kills 12] [--json]

Three Ray nodes on this machine: a head for the router, two with room for one replica of two workers each, which
`octavo up --on ray` places there. Streams run once undisturbed, once while a node is removed, and once more after a new
node has taken its place. With --kills, no node is removed: a worker of replica 1 is killed that many times, whenever it
is back, and the replica goes into quarantine after each third time. Prints events with their times; exits 1 if a stream
fails or its tokens differ. Needs Ray (pip install 'octavo[ray]').
"""

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from octavo import SamplingParams
from tests.support.models.tiny_model import make_tiny_model
from tests.support.streams import say

_STORE = 80 * 2**20
# Ray gives up a silent node within two seconds; with its own setting it takes fifteen or more.
_FAST_CHECKS = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 2}
_TIMEOUT_S = 120.0
# CPUs of a replica: a scheduler and two workers.
_CPUS = 3
# Words of the log lines that tell what happened.
_TELLING = ("has joined", "epoch ", "is gone", "it is at ", "requests were", "in quarantine", "after a quarantine")
# With --kills: deaths within a minute that a replica survives, and seconds of a quarantine.
_RESTARTS, _QUARANTINE_S = 2, 1
Tokens = list[tuple[int, ...]]


class Log:
    """The output of `octavo up`, line by line."""

    def __init__(self, process: subprocess.Popen[str], began: float) -> None:
        self.lines: list[str] = []
        self._process, self._began = process, began
        self._is_over = False
        self._grown = threading.Condition()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def wait_for(self, words: str, count: int = 1) -> None:
        with self._grown:
            self._grown.wait_for(lambda: self._is_over or self._count(words) >= count, _TIMEOUT_S)
            if self._count(words) < count:
                raise TimeoutError(f"{words!r} did not come {count} times:\n" + "\n".join(self.lines))

    def join(self) -> None:
        self._thread.join()

    def _count(self, words: str) -> int:
        return sum(words in line for line in self.lines)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._grown:
                self.lines.append(f"{time.monotonic() - self._began:6.1f} s  {line.rstrip()}")
                self._grown.notify_all()
        with self._grown:
            self._is_over = True
            self._grown.notify_all()


def main() -> int:
    parser = argparse.ArgumentParser(description="Removes a node of a Ray cluster while streams run.")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=600, help="tokens of each stream")
    parser.add_argument("--kills", type=int, default=0, help="of a worker, in place of a node's removal")
    parser.add_argument("--port", type=int, default=50971)
    parser.add_argument("--json", action="store_true", help="one line")
    arguments = parser.parse_args()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # For all processes that Ray starts here.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        cluster = _make_nodes()
        stack.callback(cluster.shutdown)
        node, _ = (cluster.add_node(num_cpus=_CPUS, object_store_memory=_STORE) for _ in range(2))
        _say(arguments, began, "three nodes are up")
        up = _start(Path(directory), cluster.address, arguments)
        log = Log(up, began)
        stack.callback(log.join)
        stack.callback(up.kill)
        try:
            outcome = _run(arguments, began, cluster, node, log)
            outcome["ended_early"] = up.poll() is not None
        except BaseException:
            print("\n".join(log.lines), file=sys.stderr)
            raise
        up.send_signal(signal.SIGINT)
        outcome["exit_code"] = up.wait(_TIMEOUT_S)
        _say(arguments, began, f"Ctrl-C: exit code {outcome['exit_code']}")
        if not arguments.json:
            for line in log.lines:
                if any(words in line for words in _TELLING):
                    print(f"    {line[:170]}")
    if arguments.json:
        print(json.dumps(outcome))
    return 0 if outcome["equal"] and not outcome["exit_code"] and not outcome["ended_early"] else 1


def _run(arguments: argparse.Namespace, began: float, cluster: Any, node: Any, log: Log) -> dict[str, Any]:
    log.wait_for("ready for epoch", 4)
    log.wait_for("serving; Ctrl-C to stop")
    _say(arguments, began, "two replicas of two workers are ready")
    undisturbed, seconds = _stream(arguments, lambda: None)
    _say(arguments, began, f"{arguments.streams} streams of {arguments.tokens} tokens took {seconds:.1f} s")
    if arguments.kills:
        return _kill_again_and_again(arguments, began, log, undisturbed)

    def lose_node() -> None:
        cluster.remove_node(node)
        _say(arguments, began, "streams run; a node is removed")

    disturbed, disturbed_seconds = _stream(arguments, lose_node)
    verdict = _verdict(disturbed, undisturbed)
    _say(arguments, began, f"all streams have ended, after {disturbed_seconds:.1f} s: {verdict}")
    cluster.add_node(num_cpus=_CPUS, object_store_memory=_STORE)
    added = time.monotonic()
    _say(arguments, began, "a new node is added")
    log.wait_for("ready for epoch", 6)
    back_seconds = time.monotonic() - added
    _say(arguments, began, f"the replica is back, {back_seconds:.1f} s later")
    again, _ = _stream(arguments, lambda: None)
    _say(arguments, began, f"the streams once more: {_verdict(again, undisturbed)}")
    return {
        "equal": disturbed == undisturbed and again == undisturbed,
        "undisturbed_s": round(seconds, 2),
        "with_a_node_lost_s": round(disturbed_seconds, 2),
        "back_after_s": round(back_seconds, 2),
    }


def _kill_again_and_again(arguments: argparse.Namespace, began: float, log: Log, undisturbed: Tokens) -> dict[str, Any]:
    killed = set[int]()

    def kill_all() -> None:
        while len(killed) < arguments.kills:
            for process in psutil.Process().children(recursive=True):
                # It may have gone, or not be a worker yet.
                with contextlib.suppress(psutil.Error):
                    words = process.cmdline()
                    is_it = words[1:3] == ["-m", "worker"] and words[-4:] == ["--replica", "1", "--rank", "0"]
                    if is_it and process.pid not in killed:
                        process.kill()
                        killed.add(process.pid)
                        _say(arguments, began, f"a worker of replica 1 is killed ({len(killed)})")

    killing = threading.Thread(target=kill_all, daemon=True)
    disturbed, _ = _stream(arguments, killing.start)
    is_equal, num_rounds = disturbed == undisturbed, 1
    while killing.is_alive():
        is_equal &= _stream(arguments, lambda: None)[0] == undisturbed
        num_rounds += 1
    num_quarantines = arguments.kills // (_RESTARTS + 1)
    log.wait_for("replica 1 is in quarantine", num_quarantines)
    log.wait_for("after a quarantine, with all of replica 1", num_quarantines)
    verdict = "the same tokens" if is_equal else "OTHER TOKENS"
    _say(arguments, began, f"{arguments.kills} kills during {num_rounds} rounds of streams: {verdict}")
    return {"equal": is_equal, "kills": len(killed), "rounds": num_rounds, "quarantines": num_quarantines}


def _make_nodes() -> Any:
    """Starts a Ray cluster that has only its head node."""
    cluster_utils = importlib.import_module("ray.cluster_utils")
    head = {
        "num_cpus": 0,
        "object_store_memory": _STORE,
        "include_dashboard": False,
        "_system_config": _FAST_CHECKS,
    }
    return cluster_utils.Cluster(initialize_head=True, head_node_args=head)


def _start(directory: Path, address: str, arguments: argparse.Namespace) -> subprocess.Popen[str]:
    model = make_tiny_model(directory / "model")
    # Long enough for streams still to run when the node is removed.
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    return subprocess.Popen(
        [
            *(sys.executable, "-c", "from octavo.cli.main import main; main()", "up", "--on=ray", f"--model={model}"),
            *("--load-format=dummy", "--dtype=float32", "--kv-cache-memory=0.02", "--data-parallel-size=2"),
            *("--tensor-parallel-size=2", "--max-num-seqs=16", "--metrics-port=0", "--http-port=0"),
            f"--port={arguments.port}",
            *((f"--max-restarts={_RESTARTS}", f"--max-quarantine={_QUARANTINE_S}") if arguments.kills else ()),
        ],
        env={**os.environ, "RAY_ADDRESS": address},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _stream(arguments: argparse.Namespace, when_begun: Callable[[], None]) -> tuple[Tokens, float]:
    """Returns the tokens of all streams, and the seconds that they took. Calls when_begun once all have tokens."""
    numbers = range(arguments.streams)
    sampling = [
        SamplingParams(temperature=0.8 * (number % 2), seed=number, max_tokens=arguments.tokens, ignore_eos=True)
        for number in numbers
    ]
    began = time.monotonic()
    tokens = say(arguments.port, [f"w{5 + number} w9 w11" for number in numbers], sampling, when_begun)
    return tokens, time.monotonic() - began


def _verdict(said: Tokens, expected: Tokens) -> str:
    return "the same tokens" if said == expected else "OTHER TOKENS"


def _say(arguments: argparse.Namespace, began: float, text: str) -> None:
    if not arguments.json:
        print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
