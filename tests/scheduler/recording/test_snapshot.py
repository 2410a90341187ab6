"""A core restored from a snapshot that was encoded and decoded continues exactly as the original, in any state.

The random walks are those of the property tests: every mode, and all scarce resources run out all the time. They drive
one core; this test asserts that a second one, made from a snapshot at any time, agrees with it from then on.
"""

import dataclasses
from collections import Counter
from collections.abc import Collection
from random import Random
from typing import TypeVar

import msgspec
import numpy as np
import pytest

from scheduler.core.core import Core
from scheduler.core.messages import (
    ChoiceStart,
    CoreSettings,
    GroupRequest,
    Plan,
    Preempted,
    Rejection,
    Result,
    SequenceEnd,
    StepCosts,
    StepOutputs,
    StopRules,
    WantedItem,
)
from scheduler.core.saved import Snapshot
from scheduler.recording.records import plan_record
from tests.properties.walk import walk
from tests.properties.workloads import SPECULATIONS

SETTINGS = CoreSettings(block_size=4, num_blocks=30, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16)
REQUEST = GroupRequest(
    group=1,
    request_id="request-1",
    prompt_token_ids=tuple(range(6)),
    choices=(ChoiceStart(choice=0),),
    stop=StopRules(max_tokens=4),
)
Answer = TypeVar("Answer")

NUM_WALKS = 4
KINDS: dict[str, dict[str, object]] = {
    "any": {},
    "swap": {"preemption_mode": "swap", "num_swap_blocks": 40},
    "drafts": {"speculation": SPECULATIONS[3]},
    "drafts of the core": {"speculation": SPECULATIONS[2], "max_steps_in_flight": 3, "num_stages": 1},
    "steps in flight": {"max_steps_in_flight": 3, "num_stages": 1, "speculation": None},
    "stages": {"max_steps_in_flight": 4, "num_stages": 3},
    "items": {"encoder_cache_size": 12, "max_num_encoder_input_tokens": 6},
    "in time": {"inter_token_latency_target": 0.02, "enable_chunked_prefill": True, "max_steps_in_flight": 2},
    "prefills first": {
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": 40,
        "long_prefill_token_threshold": 0,
    },
}
# Contents that the snapshots of each kind must have had; otherwise they prove little.
HELD = {
    "any": ["running", "waiting", "a plan in flight", "cached blocks", "hashes", "queued"],
    "swap": ["host blocks"],
    "drafts": ["a plan in flight with drafts", "recent outputs", "costs"],
    "drafts of the core": ["a plan in flight with drafts"],
    "steps in flight": ["plans in flight", "resting rows", "untold rows"],
    "stages": ["plans in flight"],
    "items": ["items", "unheld items", "held items", "forgotten items", "inputs asked for", "inputs"],
    "in time": ["prices", "a limited plan in flight"],
    "prefills first": ["running"],
}


def copy_of(core: Core) -> Core:
    """A copy of the core, by way of a snapshot's bytes."""
    snapshot = msgspec.msgpack.decode(msgspec.msgpack.encode(core.save()), type=Snapshot)
    copy = Core(snapshot.settings)
    copy.restore(snapshot)
    assert copy.save() == snapshot
    return copy


def count(snapshot: Snapshot, held: Counter[str]) -> None:
    sequences = [sequence for group in snapshot.groups for sequence in group.sequences]
    held["snapshots"] += 1
    held["running"] += any(sequence.row >= 0 for sequence in sequences)
    held["waiting"] += any(sequence.row < 0 for sequence in sequences)
    held["queued"] += any(group.is_queued for group in snapshot.groups)
    held["drafts"] += any(sequence.drafts for sequence in sequences)
    held["host blocks"] += any(sequence.host_blocks for sequence in sequences)
    held["a plan in flight"] += len(snapshot.in_flight) == 1
    held["plans in flight"] += len(snapshot.in_flight) > 1
    held["a plan in flight with drafts"] += any(step.num_drafts for step in snapshot.in_flight)
    held["recent outputs"] += bool(snapshot.drafting and snapshot.drafting.recent_outputs)
    held["costs"] += bool(snapshot.drafting and snapshot.drafting.costs)
    if snapshot.items is not None:
        held["items"] += bool(snapshot.items.items)
        held["unheld items"] += len(snapshot.items.unheld) > 1
        held["held items"] += any(sequence.holds_item for sequence in sequences)
        held["forgotten items"] += bool(snapshot.items.forgotten)
        held["inputs asked for"] += any(state == "asked" for *_, state in snapshot.items.items)
        held["inputs"] += any(state == "prepared" for *_, state in snapshot.items.items)
    held["prices"] += bool(snapshot.pace and any(snapshot.pace.prices[0]))
    held["a limited plan in flight"] += any(step.timing and step.timing.is_limited for step in snapshot.in_flight)
    held["cached blocks"] += bool(snapshot.pool.cached)
    held["hashes"] += bool(snapshot.pool.hashes)
    held["resting rows"] += bool(snapshot.rows.resting)
    held["untold rows"] += bool(snapshot.rows.untold)


class TwinCore(Core):
    """Has a twin that is made again and again from a snapshot; asserts that both give the same answers."""

    held: Counter[str]

    def __init__(self, settings: CoreSettings) -> None:
        super().__init__(settings)
        self._choose = Random(0)
        self.twin = Core(settings)

    def _may_copy(self) -> None:
        if self._choose.random() < 0.15:
            self.twin = copy_of(self)
            count(self.save(), self.held)

    # `expire` needs no override: it consists of cancels.

    def submit(self, request: GroupRequest, now: float) -> Rejection | None:
        self._may_copy()
        return same(super().submit(request, now), self.twin.submit(request, now))

    def cancel(self, group: int, choices: Collection[int] | None, now: float, *, cause: str = "") -> list[SequenceEnd]:
        ends = super().cancel(group, choices, now, cause=cause)
        return same(ends, self.twin.cancel(group, choices, now, cause=cause))

    def set_costs(self, costs: StepCosts) -> None:
        super().set_costs(costs)
        self.twin.set_costs(costs)

    def schedule(self, now: float) -> Plan | None:
        self._may_copy()
        plan, of_twin = super().schedule(now), self.twin.schedule(now)
        same(*(each and plan_record(each) for each in (plan, of_twin)))
        return plan

    def schedule_empty(self) -> Plan | None:
        self._may_copy()
        plan, of_twin = super().schedule_empty(), self.twin.schedule_empty()
        same(*(each and plan_record(each) for each in (plan, of_twin)))
        return plan

    def apply(self, result: Result, now: float) -> StepOutputs:
        self._may_copy()
        outputs, of_twin = super().apply(result, now), self.twin.apply(result, now)
        for column in ("groups", "choices", "first_tokens", "token_ids"):
            assert np.array_equal(getattr(outputs, column), getattr(of_twin, column)), column
        same(outputs.ends, of_twin.ends)
        return outputs

    def take_ends(self) -> list[SequenceEnd]:
        return same(super().take_ends(), self.twin.take_ends())

    def take_events(self) -> list[Preempted]:
        return same(super().take_events(), self.twin.take_events())

    def take_wanted_items(self) -> list[WantedItem]:
        wanted = super().take_wanted_items()
        # A copy has none of those that were not taken before.
        of_twin = self.twin.take_wanted_items()
        assert wanted[len(wanted) - len(of_twin) :] == of_twin
        return wanted

    def item_prepared(self, number: int) -> None:
        super().item_prepared(number)
        self.twin.item_prepared(number)

    def item_failed(self, number: int, message: str, now: float) -> list[SequenceEnd]:
        return same(super().item_failed(number, message, now), self.twin.item_failed(number, message, now))

    def lose_workers(self, now: float) -> None:
        super().lose_workers(now)
        self.twin.lose_workers(now)

    def blame_step(self, now: float) -> int:
        return same(super().blame_step(now), self.twin.blame_step(now))

    def resize(
        self, num_blocks: int, num_swap_blocks: int = 0, *, encoder_cache_size: int | None = None, now: float
    ) -> None:
        for resize in (super().resize, self.twin.resize):
            resize(num_blocks, num_swap_blocks, encoder_cache_size=encoder_cache_size, now=now)

    def reset_prefix_cache(self) -> int:
        return same(super().reset_prefix_cache(), self.twin.reset_prefix_cache())


def same(answer: Answer, of_twin: Answer) -> Answer:
    assert answer == of_twin
    return answer


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_made_at_any_time_plans_what_the_core_plans(kind: str):
    seen: Counter[str] = Counter()

    class Twin(TwinCore):
        held = seen

    for index in range(NUM_WALKS):
        walk(f"snapshot/{kind}/{index}", core_class=Twin, changes=KINDS[kind])
    assert not [each for each in HELD[kind] if not seen[each]], seen


def test_a_timeline_goes_on_in_the_copy():
    core = Core(SETTINGS)
    core.submit(REQUEST, 1.0)
    core.schedule(2.0)
    copy = copy_of(core)
    for each in (core, copy):
        each.cancel(1, None, 3.0)
    assert copy.explain("request-1") == core.explain("request-1")
    assert [entry.time for entry in copy.explain("request-1")[0].entries] == [1.0, 2.0, 2.0, 3.0]


def test_copies_out_that_no_plan_has_told_yet_are_told_by_the_copy():
    core = Core(dataclasses.replace(SETTINGS, num_swap_blocks=4))
    core.submit(REQUEST, 1.0)
    copy = Core(core.settings)
    copy.restore(msgspec.structs.replace(core.save(), swapped_out=[(5, 0)]))
    plan = copy.schedule(2.0)
    assert plan is not None
    assert plan.swapped_out == [(5, 0)]


def test_deadlines_pass_in_the_copy():
    core = Core(SETTINGS)
    core.submit(dataclasses.replace(REQUEST, deadline=5.0), 1.0)
    copy = copy_of(core)
    assert not copy.expire(4.0)
    assert [end.key for end in copy.expire(5.0)] == [(1, 0)]


def test_a_snapshot_that_contradicts_itself_is_not_taken():
    core = Core(SETTINGS)
    core.submit(REQUEST, 1.0)
    core.schedule(2.0)
    snapshot = core.save()
    twice = msgspec.structs.replace(snapshot.pool, free=[*snapshot.pool.free, 1])
    with pytest.raises(AssertionError):
        Core(core.settings).restore(msgspec.structs.replace(snapshot, pool=twice))
    with pytest.raises(AssertionError, match="other settings"):
        Core(dataclasses.replace(core.settings, num_blocks=7)).restore(snapshot)
