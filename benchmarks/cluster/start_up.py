"""Start-up time until the first token: `octavo up -c configs/local.yaml` (a router, two schedulers, two workers).

    python -m benchmarks.cluster.start_up [--rounds 5] [--empty-caches] [--json] [any flag of `octavo up`]

Each round starts the cluster on ports of its own, waits for the first token of a chat and for every worker, and stops
it. Reports medians over the rounds: the seconds from the command's start to each event, in the earliest process of each
kind; and the CPU seconds of each kind up to the first token, which other work on the machine disturbs least. Files are
in the system's page cache, as in a user's second start: nothing drops them, and the first round does not count.
--empty-caches gives each round an OCTAVO_CACHE_DIR that holds only the compiled kernels.
"""

import argparse
import json
import math
import os
import re
import select
import shutil
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from datetime import datetime
from pathlib import Path

import psutil

from benchmarks.cluster.up import LOCAL, ROOT, started
from configs.flags import parse_flags
from configs.load import load_options
from kernels.native.cache_directory import cache_directory

QUESTION = "What is the capital of France? Answer briefly."
TIMEOUT_S = 120.0

# First words of a log line -> the event that it shows.
_EVENTS = {
    "imported, ": "{kind}: imported",
    "listening ": "{kind}: listening",
    "torch is imported": "{kind}: torch imported",
    "weights are loaded": "{kind}: weights loaded",
    "ready for epoch": "{kind}: ready",
}
_LINE = re.compile(r"^(?P<kind>worker|scheduler|router)[ \d.]*\| (?P<record>.*)$")


class _Round:
    """The events of one start so far: event -> seconds since the command began."""

    def __init__(self, up: subprocess.Popen[bytes], began: float, num_workers: int) -> None:
        self._up, self._began = up, began
        self._num_loading = num_workers
        self.seconds: dict[str, float] = {}
        self._was_asked = False

    def watch(self) -> dict[str, float]:
        """Reads the output of `octavo up` until the first token has come and every worker is ready."""
        assert self._up.stdout is not None
        rest = b""
        while "first token" not in self.seconds or self._num_loading:
            if not select.select([self._up.stdout], [], [], TIMEOUT_S)[0]:
                raise SystemExit(f"no output for {TIMEOUT_S:g} s; events so far: {self.seconds}")
            data = os.read(self._up.stdout.fileno(), 65536)
            if not data:
                raise SystemExit(f"`octavo up` ended with exit code {self._up.wait()}: {rest.decode()}")
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._take(line.decode(errors="replace"))
            # Tokens are printed before their line ends.
            self._look_for_token(rest.decode(errors="replace"))
        return self.seconds

    def _take(self, line: str) -> None:
        if (said := _LINE.match(line)) is not None:
            self._take_record(said["kind"], said["record"])
        elif line.startswith("Ready in"):
            self.seconds["cluster: serving"] = time.time() - self._began
        elif line.startswith(f"> {QUESTION}"):
            self._was_asked = True
        else:
            self._look_for_token(line)

    def _look_for_token(self, text: str) -> None:
        is_one = self._was_asked and text.strip() and not _LINE.match(text)
        if is_one and "first token" not in self.seconds:
            self.seconds["first token"] = time.time() - self._began
            self.seconds |= cpu_seconds(self._up.pid)

    def _take_record(self, kind: str, text: str) -> None:
        record = json.loads(text)
        at = datetime.fromisoformat(record["timestamp"]).timestamp() - self._began
        for words, event in _EVENTS.items():
            if record["event"].startswith(words):
                self._note(event.format(kind=kind), at)
                if words == "imported, ":
                    self._note(f"{kind}: process begun", at - float(record["event"].split()[1]))
                elif words == "ready for epoch":
                    self._num_loading -= 1
                    if not self._num_loading:
                        self._note("every worker: ready", at)

    def _note(self, event: str, at: float) -> None:
        self.seconds[event] = min(at, self.seconds.get(event, math.inf))


def measure(flags: list[str], cache: Path | None) -> dict[str, float]:
    """Starts the cluster once. Returns the seconds of its events and of "CPU of <kind>". cache: a directory to use as
    the cache instead of the user's."""
    options = load_options(ROOT / LOCAL, parse_flags(flags)[1], {})
    began = time.time()
    with started(
        *("-c", LOCAL, "--first-prompt", QUESTION, "--port=0", "--log-level=debug", "--log-format=json", *flags),
        environment={"OCTAVO_CACHE_DIR": str(cache)} if cache else None,
        text=False,
    ) as up:
        return _Round(up, began, options.data_parallel_size * options.world_size).watch()


def cpu_seconds(launcher: int) -> dict[str, float]:
    """CPU seconds of the launcher's processes so far, by kind and in total."""
    used: defaultdict[str, float] = defaultdict(float)
    parent = psutil.Process(launcher)
    for each in [parent, *parent.children(recursive=True)]:
        command = each.cmdline()
        kind = command[2] if command[1:2] == ["-m"] else "launcher"
        times = each.cpu_times()
        used[f"CPU of {kind}"] += times.user + times.system
    return {**used, "CPU of all": sum(used.values())}


def fresh_cache(directory: Path) -> Path:
    """Makes a cache directory that holds only the compiled kernels."""
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(cache_directory("kernels"), directory / "kernels")
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--empty-caches", action="store_true")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    arguments, flags = parser.parse_known_args()
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as directory:
        measure(flags, None)
        for _ in range(arguments.rounds):
            cache = fresh_cache(Path(directory) / "cache") if arguments.empty_caches else None
            rounds.append(measure(flags, cache))
    medians = {name: round(statistics.median(each[name] for each in rounds), 2) for name in rounds[0]}
    ordered = dict(sorted(medians.items(), key=lambda item: (item[0].startswith("CPU"), item[1])))
    if arguments.json:
        first = [round(each["first token"], 2) for each in rounds]
        print(json.dumps({"empty_caches": arguments.empty_caches, "flags": flags, "first_token_s": first} | ordered))
        return
    for name, value in ordered.items():
        print(f"{name:26} {value:6.2f} s")


if __name__ == "__main__":
    main()
