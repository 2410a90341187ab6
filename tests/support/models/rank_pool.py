"""Processes that are workers of one cluster after another, so that the slowest part, importing torch, is done once.

    python -m tests.support.models.rank_pool

reads lines, each a JSON list of flags of `python -m worker`, runs that worker to its end, and prints its exit code.
MOST_LOGPROBS does not limit these workers.
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
            # After a failure a worker may still run; it does not read its input.
            process.kill()
            with process:
                pass

    def start(self, flags: Sequence[Sequence[str]]) -> None:
        """Starts one worker for each list of flags."""
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
        """Waits until `count` workers have ended with exit code 0."""
        for process in self._processes[:count]:
            assert process.stdout is not None
            assert process.stdout.readline() == "0\n", "a worker failed; its output is above"


def main() -> None:
    import torch

    from worker.__main__ import main as run_worker
    from worker.sampling import features as row_sampling

    row_sampling.MOST_LOGPROBS = sys.maxsize

    # May be called only once in a process.
    torch.set_num_interop_threads(1)
    torch.set_num_interop_threads = lambda num_threads: None
    for line in sys.stdin:
        print(run_worker(json.loads(line)), flush=True)


if __name__ == "__main__":
    main()
