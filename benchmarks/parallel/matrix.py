"""Checks every model family on every layout of ranks against transformers.

    python -m benchmarks.parallel.matrix [--families llama,mixtral] [--json]

A tiny random model of each family runs in float32 through real schedulers and workers, with so little room that prompts
are cut into chunks, sequences are preempted, and prefixes are found in the cache. The error is max |a - b| / max |b| of
the log-probabilities of the whole vocabulary at every output token. Exits 1 if an error is above 1e-4, if a greedy
output differs from that of transformers, or if there was no chunk, no preemption or no prefix hit.
"""

import argparse
import json
import logging
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import transformers

from tests.support.models.families import families_in, has_experts, make_model
from tests.support.models.layouts import LAYOUTS, NUM_SAID, Layout, Outcome, run_layout
from tests.support.models.rank_pool import RankPool

_MOST_ERROR = 1e-4


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks model families x layouts of ranks.")
    parser.add_argument("--families", default=",".join(families_in("ranks")), help="comma-separated")
    parser.add_argument("--json", action="store_true", help="a line for each case")
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("octavo").setLevel(logging.ERROR)
    began, outcomes = time.monotonic(), []
    with RankPool() as pool, tempfile.TemporaryDirectory() as base:
        for family in arguments.families.split(","):
            directory = Path(base) / family
            reference = make_model(family, directory)
            for layout in LAYOUTS:
                if layout.has_expert_parallel and not has_experts(family):
                    continue
                outcome = run_layout(pool, directory, reference, layout)
                outcomes.append(outcome)
                _print(family, layout, outcome, as_json=arguments.json)
    num_right = sum(map(_is_right, outcomes))
    if not arguments.json:
        print(f"{num_right} of {len(outcomes)} are right, in {time.monotonic() - began:.0f} s")
    return 0 if num_right == len(outcomes) else 1


def _is_right(outcome: Outcome) -> bool:
    has_all = bool(outcome.num_preemptions and outcome.num_prefix_hits and outcome.num_chunked)
    return outcome.error <= _MOST_ERROR and outcome.num_equal == NUM_SAID and has_all


def _print(family: str, layout: Layout, outcome: Outcome, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"family": family, "layout": str(layout), **asdict(outcome)}), flush=True)
        return
    print(
        f"{family:12} {layout!s:24} error {outcome.error:.1e}, greedy {outcome.num_equal} of {NUM_SAID} equal, "
        f"{outcome.num_preemptions} preemptions, {outcome.num_prefix_hits} tokens cached"
        f"{'' if _is_right(outcome) else '   WRONG'}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
