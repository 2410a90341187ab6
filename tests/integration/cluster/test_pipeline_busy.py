"""Two stages have work all the time (see tests.support.models.busy_stages). `python -m benchmarks.parallel.pipeline`
prints the shares."""

import asyncio
from pathlib import Path

from tests.support.models.busy_stages import busy_shares


def test_both_stages_are_busy_while_streams_decode(tmp_path: Path) -> None:
    """Takes the best of three parts: a busy machine may delay threads for longer than steps take."""
    first, last = asyncio.run(busy_shares(tmp_path, 16))
    assert max(min(each) for each in zip(first, last, strict=True)) > 0.75


def test_with_one_step_in_flight_one_stage_waits_for_the_other(tmp_path: Path) -> None:
    """Shows that the shares above are due to several steps in flight."""
    first, last = asyncio.run(busy_shares(tmp_path, 12, max_steps_in_flight=1))
    assert max(sum(each) for each in zip(first, last, strict=True)) < 1.3
