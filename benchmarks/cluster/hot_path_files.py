"""Counts the files of Octavo that run for one greedy token, and for a request until its first token, and the calls of
their functions for a token.

    python -m benchmarks.cluster.hot_path_files [--json] [--list] [--checkout DIR]

`octavo up` serves SmolLM2 (a router, a scheduler, a worker on CPUs), and our client streams a few requests, one at a
time. Each of these processes, the client too, records the file and the time of every call of a Python function. A file
counts for a token if it ran between two tokens in at least half of the gaps of all streams, and for a request if it ran
between the call and the first token in at least half of the requests. So files that only heartbeats and metrics run now
and then do not count; nor do files under protos/, libraries, and C++. Calls are means over all gaps.

--checkout: measures another checkout of Octavo with this one's environment. --list: also prints the files' names.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
_PROMPTS = ("What is the capital of France?", "Count from one to ten.", "Tell me about rain.", "Write about the sea.")
_NUM_TOKENS = 24
_GROUPS = ("octavo", "router", "scheduler", "worker", "kernels", "configs", "runtime")
_DUMP_TIMEOUT_S = 20.0

# Runs in every process of the checkout from its start; records for each file how often its functions were called in
# each millisecond.
_RECORDER = """
import json, os, sys, threading, time
ROOT, OUT = os.environ["HOT_PATH_ROOT"] + "/", os.environ["HOT_PATH_OUT"]
NUM_ROOT, SEEN, MILLISECOND = len(ROOT), {}, time.monotonic_ns

def note(frame, event, _):
    if event == "call":
        file = frame.f_code.co_filename
        if file.startswith(ROOT):
            times = SEEN.setdefault(file, {})
            at = MILLISECOND() // 1_000_000
            times[at] = times.get(at, 0) + 1

def dump():
    while not os.path.exists(OUT + "/dump"):
        time.sleep(0.05)
    seen = {file[NUM_ROOT:]: list(times.items()) for file, times in list(SEEN.items())}
    path = OUT + "/%d" % os.getpid()
    with open(path, "w") as out:
        json.dump(seen, out)
    os.rename(path, path + ".json")

threading.Thread(target=dump, daemon=True).start()
threading.setprofile(note)
sys.setprofile(note)
"""


def client(target: str) -> None:
    """Streams the prompts; prints, for each, when it was sent and when each of its tokens came, in milliseconds."""
    from octavo import Client, Delta, SamplingParams

    moments = []
    with Client(target, timeout=300) as connection:
        connection.chat("Hello.", SamplingParams(temperature=0.0, max_tokens=4))
        for prompt in _PROMPTS:
            times = [time.monotonic_ns() // 1_000_000]
            sampling = SamplingParams(temperature=0.0, max_tokens=_NUM_TOKENS, ignore_eos=True)
            for event in connection.stream([{"role": "user", "content": prompt}], sampling):
                if isinstance(event, Delta) and event.token_ids:
                    times.append(time.monotonic_ns() // 1_000_000)
            moments.append(times)
    print(json.dumps(moments), flush=True)
    sys.stdin.read()


def record(checkout: Path) -> tuple[list[list[int]], dict[str, Counter[int]]]:
    """Returns the times that the client saw, and for each file the calls in each millisecond, of all processes."""
    port = free_port()
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "sitecustomize.py").write_text(_RECORDER)
        environment = {
            **os.environ,
            "PYTHONPATH": f"{directory}:{checkout}",
            "HOT_PATH_ROOT": str(checkout),
            "HOT_PATH_OUT": directory,
        }
        up = subprocess.Popen(
            [
                *(str(Path(sys.executable).with_name("octavo")), "up", "-c", "configs/local.yaml"),
                *("--data-parallel-size=1", f"--runtime-dir={directory}/run", f"--port={port}"),
                *("--metrics-port=0", "--http-port=0"),
            ],
            cwd=checkout,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert up.stdout is not None
        try:
            output = []
            for line in up.stdout:
                output.append(line)
                if "serving; Ctrl-C" in line:
                    break
            else:
                raise SystemExit("the cluster did not start:\n" + "".join(output))
            caller = subprocess.Popen(
                [sys.executable, __file__, "--client", f"localhost:{port}"],
                cwd=checkout,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert caller.stdout is not None
            moments = json.loads(caller.stdout.readline())
            Path(directory, "dump").touch()
            executed = _dumped(Path(directory), {"worker", "scheduler", "router"})
            caller.communicate()
        finally:
            up.terminate()
            up.communicate()
    return moments, executed


def _dumped(directory: Path, awaited: set[str]) -> dict[str, Counter[int]]:
    """Merges the records of all processes, once the awaited packages and the client have written theirs."""
    deadline = time.monotonic() + _DUMP_TIMEOUT_S
    while True:
        dumps = [json.loads(path.read_text()) for path in directory.glob("*.json")]
        mains = {file.split("/")[0] for dump in dumps for file in dump if file.endswith("/__main__.py")}
        if awaited <= mains and len(dumps) > len(awaited) + 1:
            break
        if time.monotonic() > deadline:
            raise SystemExit(f"no record of {awaited - mains or 'the client'} after {_DUMP_TIMEOUT_S:.0f} s")
        time.sleep(0.2)
    executed: dict[str, Counter[int]] = {}
    for dump in dumps:
        for file, times in dump.items():
            executed.setdefault(file, Counter()).update(dict(times))
    return executed


def calls_a_token(executed: dict[str, Counter[int]], moments: list[list[int]]) -> dict[str, float]:
    """Returns the calls for a token by package, over the gaps from the third token on."""
    num_tokens, totals = sum(len(times) - 3 for times in moments), Counter[str]()
    for file, times in executed.items():
        if _counts(file):
            totals[file.split("/")[0]] += sum(
                count for at, count in times.items() if any(each[2] <= at < each[-1] for each in moments)
            )
    return {group: totals[group] / num_tokens for group in _GROUPS if totals[group]}


def crossed(executed: dict[str, Counter[int]], windows: list[tuple[int, int]]) -> list[str]:
    """Files that ran in at least half of the windows [begin, end], in milliseconds."""
    counts = Counter(
        file
        for file, times in executed.items()
        for begin, end in windows
        if any(moment in times for moment in range(begin, end + 1))
    )
    return sorted(file for file, count in counts.items() if 2 * count >= len(windows) and _counts(file))


def _counts(file: str) -> bool:
    return file.split("/")[0] in _GROUPS and file.endswith(".py")


def by_group(files: Iterable[str]) -> dict[str, int]:
    counts = Counter(file.split("/")[0] for file in files)
    return {group: counts[group] for group in _GROUPS if counts[group]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, default=ROOT)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--client", metavar="HOST:PORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        client(arguments.client)
        return
    moments, executed = record(arguments.checkout.resolve())
    found = {
        "a token": crossed(executed, [gap for times in moments for gap in pairwise(times[2:])]),
        "a request to its first token": crossed(executed, [(times[0], times[1]) for times in moments]),
    }
    calls = calls_a_token(executed, moments)
    if arguments.json:
        result: dict[str, Any] = {what: {"files": len(files), **by_group(files)} for what, files in found.items()}
        print(json.dumps(result | {"calls a token": calls}))
    else:
        for what, files in found.items():
            groups = (f"{group} {count}" for group, count in by_group(files).items())
            print(f"{what}: {len(files)} files", *groups, sep=", ")
        groups = (f"{group} {count:.0f}" for group, count in calls.items())
        print(f"calls a token: {sum(calls.values()):.0f}", *groups, sep=", ")
    if arguments.list:
        for what, files in found.items():
            print(f"\n{what}:", *files, sep="\n  ")


if __name__ == "__main__":
    main()
