"""Processes that are workers of one cluster after another: what takes them longest, importing torch, is done once.

    python -m tests.support.models.rank_pool

reads lines, each a JSON list of the flags of `python -m worker`, runs that worker to its end, and prints its exit code.
These workers give logprobs of as many tokens as are asked for.
"""

import json
import subprocess
import sys
from collections.abc import Sequence

from tests.support.repository import ROOT
from tests.support.up import environment


class RankPool:
    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            # A worker that still runs, after a failure, does not read.
            process.kill()
            with process:
                pass

    def start(self, flags: Sequence[Sequence[str]]) -> None:
        """A worker of each of these flags."""
        while len(self._processes) < len(flags):
            command = [sys.executable, "-m", "tests.support.models.rank_pool"]
            self._processes.append(
                subprocess.Popen(
                    command, cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )
        for process, each in zip(self._processes, flags, strict=False):
            assert process.stdin is not None
            process.stdin.write(f"{json.dumps(list(each))}\n")
            process.stdin.flush()

    def wait(self, count: int) -> None:
        """Until so many workers have ended, in an orderly way."""
        for process in self._processes[:count]:
            assert process.stdout is not None
            assert process.stdout.readline() == "0\n", "a worker failed; what it said is above"


def main() -> None:
    import torch

    from worker.__main__ import main as run_worker
    from worker.sampling import features as row_sampling

    row_sampling.MAX_LOGPROBS = sys.maxsize

    # Which may be said once in a process.
    torch.set_num_interop_threads(1)
    torch.set_num_interop_threads = lambda num_threads: None
    for line in sys.stdin:
        print(run_worker(json.loads(line)), flush=True)


if __name__ == "__main__":
    main()
