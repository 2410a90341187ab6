"""Steps are noted while a person watches, and only then."""

import numpy as np

from scheduler.core.messages import Plan
from scheduler.telemetry.reports import StepWatch


def plan(step: int) -> Plan:
    # Two decodes, one prefill of 30 tokens, and a row with three drafts.
    return Plan(
        step=step,
        decode_rows=np.array([1, 2], np.uint16),
        chunks=[(3, 30)],
        rows_with_drafts=np.array([4], np.uint16),
        num_drafts=np.array([3], np.int32),
        draft_token_ids=np.array([7, 8, 9], np.int32),
    )


def test_nothing_is_noted_before_the_first_look_and_ten_seconds_after_the_last() -> None:
    watch = StepWatch()
    watch.note_sent(plan(1), 0.0)
    watch.note_returned(1, 0.1, 0.1)
    assert watch.look(1.0) == ()
    watch.note_sent(plan(2), 2.0)
    watch.note_returned(2, 0.5, 2.5)
    (seen,) = watch.look(3.0)
    assert (seen.step, seen.seconds, seen.age) == (2, 0.5, 0.5)
    assert (seen.num_decode_tokens, seen.num_draft_tokens, seen.num_prefill_tokens) == (3, 3, 30)
    watch.note_sent(plan(3), 14.0)
    watch.note_returned(3, 0.5, 14.5)
    assert [each.step for each in watch.look(15.0)] == [2]
    assert watch.look(90.0) == (), "a minute later they are old"


def test_steps_that_never_return_are_forgotten() -> None:
    watch = StepWatch()
    watch.look(0.0)
    for step in range(1000):
        watch.note_sent(plan(step), 1.0)
    assert len(watch._in_flight) <= 128
