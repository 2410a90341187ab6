"""`python -m benchmarks.faults.chaos --grey`."""

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil

from benchmarks.faults.command import Say
from benchmarks.faults.crowd import make_plans
from benchmarks.faults.grey.ground import Ground, standing
from benchmarks.faults.grey.kinds import FAULTS
from benchmarks.faults.grey.report import append_results, as_line, read_results, table
from benchmarks.faults.grey.run import Injection, Result, Runner, Streams, injections


def add_grey_arguments(parser: argparse.ArgumentParser) -> None:
    grey = parser.add_argument_group("grey failures")
    grey.add_argument("--grey", action="store_true", help="inject faults that kill nothing, instead of kills")
    grey.add_argument("--times", type=int, default=10, help="injections of each kind")
    grey.add_argument("--kinds", default="", help=f"comma-separated; default: all. {', '.join(FAULTS)}")
    grey.add_argument("--longest", type=float, default=60.0, help="seconds that no fault exceeds")
    grey.add_argument(
        "--results", type=Path, help="file of JSON lines: new injections are added, those in it not made again"
    )


def run_grey(arguments: argparse.Namespace) -> int:
    """Returns the exit code: 1 if a stream was lost or differs, or a process was restarted without need."""
    seed = random.SystemRandom().randrange(2**31) if arguments.seed is None else arguments.seed
    began = time.monotonic()

    def say(text: str) -> None:
        if not arguments.json:
            print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True)

    say(f"seed {seed}")
    names = arguments.kinds.split(",") if arguments.kinds else list(FAULTS)
    results = read_results(arguments.results) if arguments.results else []
    made = {(each.kind, each.number) for each in results}
    streams = Streams(make_plans(arguments.streams, seed, mean_tokens=arguments.tokens))
    num_failed = 0
    with _Grounds(arguments.log) as grounds:
        for name in names:
            if missing := FAULTS[name].missing():
                say(f"{name} is left out: {missing}")
                continue
            drawn = injections([FAULTS[name]], arguments.times, seed, longest=arguments.longest)
            drawn = [each for each in drawn if (each.fault.name, each.number) not in made]
            try:
                new = _inject(grounds, streams, drawn, say)
            # The other kinds go on, with another cluster; the exit code tells.
            except (AssertionError, OSError, TimeoutError, psutil.Error) as error:
                say(f"{name} failed: {error!r}")
                num_failed += 1
                grounds.leave()
                continue
            results += new
            if arguments.results:
                append_results(arguments.results, new)
    print("\n".join(as_line(each) for each in results) if arguments.json else table(results))
    return 1 if num_failed or not all(each.is_clean for each in results) else 0


def _inject(grounds: "_Grounds", streams: Streams, drawn: Sequence[Injection], say: Say) -> list[Result]:
    if not drawn:
        return []
    ground = grounds.enter(has_weights=any(each.fault.needs_weights for each in drawn))
    return asyncio.run(Runner(ground, streams, say).run(drawn))


class _Grounds:
    """One cluster after another. log: a file that gets what each has printed."""

    def __init__(self, log: Path | None) -> None:
        self._log = log
        self._held = ExitStack()
        self._ground: Ground | None = None

    def __enter__(self) -> "_Grounds":
        return self

    def __exit__(self, *error: object) -> None:
        self.leave()

    def enter(self, *, has_weights: bool) -> Ground:
        """Returns the cluster that runs, or a new one if it does not suit."""
        if self._ground is None or self._ground.has_weights != has_weights:
            self.leave()
            directory = self._held.enter_context(tempfile.TemporaryDirectory())
            self._ground = self._held.enter_context(standing(Path(directory), has_weights=has_weights))
        return self._ground

    def leave(self) -> None:
        """Ends the cluster, if one runs."""
        if self._ground is not None and self._log is not None:
            with self._log.open("a") as file:
                file.write(self._ground.cluster.up.output + "\n")
        self._ground = None
        self._held.close()
