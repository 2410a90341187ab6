"""Workers that fail because of one request: it ends with ERROR after few epochs, and no other request loses a token."""

from collections import deque
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from scheduler.core.messages import FinishReason, GroupRequest, Plan, Result, SequenceKey
from scheduler.recording.file import RecordingWriter
from scheduler.recording.recorded_core import RecordedCore
from scheduler.recording.replay import replay
from tests.fakes.model import generate
from tests.support.scheduler.core import CoreDriver, make_request

ERROR, LENGTH = FinishReason.ERROR, FinishReason.LENGTH
# True if the workers fail in a step that computes these sequences.
Fails = Callable[[set[SequenceKey]], bool]


class FailingWorkers(CoreDriver):
    """A driver whose workers fail in some steps, which ends the epoch."""

    def __init__(self, fails: Fails, **changes: object) -> None:
        super().__init__(drafter=None, **changes)
        self._fails = fails
        self.in_flight: deque[tuple[set[SequenceKey], Result]] = deque()
        self.num_failures = 0
        # The groups in each step that failed.
        self.failed_steps: list[set[int]] = []
        self.requests: dict[int, GroupRequest] = {}

    def add(self, group: int, num_prompt_tokens: int = 5, **changes: object) -> None:
        prompt = [(group * 13 + i) % 90 for i in range(num_prompt_tokens)]
        self.requests[group] = make_request(group, prompt, **changes)  # type: ignore[arg-type]
        assert self.submit(self.requests[group]) is None

    def plan(self) -> Plan | None:
        step = self.schedule()
        if step is None:
            return None
        plan, result = step
        rows = [row for row, _ in plan.batch]
        keys = {self.core.key_of(self.worker.rows[row].sequence) for row in rows}
        assert None not in keys, "a step computes a sequence that has ended"
        self.in_flight.append((keys, result))  # type: ignore[arg-type]
        return plan

    def plan_empty(self) -> Plan | None:
        plan = self.core.schedule_empty()
        if plan is not None:
            self.in_flight.append((set(), self.worker.run(plan)))
        return plan

    def deliver(self) -> None:
        keys, result = self.in_flight.popleft()
        if self._fails(keys):
            self.failed_steps.append({group for group, _ in keys})
            self.fail()
        else:
            self.apply(result)

    def fail(self, *, in_step: bool = True) -> int:
        """Ends the epoch; returns how many groups are to be computed alone."""
        self.in_flight.clear()
        self.core.lose_workers(0.0)
        self.worker = self._make_worker(self.worker.num_blocks)
        num_alone = self.core.blame_step(0.0) if in_step else 0
        self.collect_ends(self.core.take_ends())
        self.core.check_integrity()
        return num_alone

    def run(self, max_steps: int = 5000) -> None:
        """Runs until nothing is left; results lag behind plans as far as allowed."""
        for _ in range(max_steps):
            if not self.core.has_work and not self.in_flight:
                return
            if self.plan() is None:
                self.deliver()
        raise AssertionError("no end")

    def assert_exact(self, *groups: int) -> None:
        for group in groups:
            request = self.requests[group]
            for start in request.choices:
                output = generate(request.prompt_token_ids, (), start.choice, request.stop)
                assert self.tokens[group, start.choice] == output.token_ids
                assert self.reason(group, start.choice) is LENGTH


def poisoned_by(*groups: int) -> Fails:
    return lambda keys: any(group in groups for group, _ in keys)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_steps_in_flight": 3},
        {"enable_prefix_caching": False},
        {"preemption_mode": "swap", "num_swap_blocks": 40, "max_steps_in_flight": 2},
        {"max_num_batched_tokens": 3},
        {"enable_chunked_prefill": False},
        {"num_blocks": 14},
        {"scheduling_policy": "priority"},
    ],
    ids=str,
)
@pytest.mark.parametrize("arrives", ["first", "last", "late"])
def test_a_request_that_fails_in_every_step_ends_after_three_epochs(arrives: str, changes: dict[str, object]):
    driver = FailingWorkers(poisoned_by(9), **changes)
    if arrives == "first":
        driver.add(9, 20)
    for group in range(1, 7):
        driver.add(group, 4 + group, max_tokens=12)
    if arrives == "late":
        for _ in range(4):
            if driver.plan() is None:
                driver.deliver()
    if arrives != "first":
        driver.add(9, 20)
    driver.run()
    assert driver.reason(9) is ERROR
    assert driver.ends[9, 0].message == "the workers failed in each of 3 steps that computed it"
    assert len(driver.failed_steps) == 3
    assert driver.failed_steps[2] == {9}
    driver.assert_exact(*range(1, 7))
    timeline = driver.core.explain("request-9")[0]
    assert timeline.entries[-1].reason == "error: the workers failed in each of 3 steps that computed it"


@pytest.mark.parametrize("steps", [1, 3])
def test_it_may_fail_only_where_its_prompt_ends_or_later(steps: int):
    # Its first chunks succeed, which proves nothing; nor do the tokens that it got before.
    driver = FailingWorkers(lambda keys: False, max_num_batched_tokens=8, max_steps_in_flight=steps)
    driver._fails = lambda keys: (9, 0) in keys and len(driver.tokens[9, 0]) >= 3
    driver.add(9, 30, max_tokens=10)
    for group in range(1, 4):
        driver.add(group, max_tokens=12)
    driver.run()
    assert driver.reason(9) is ERROR
    assert len(driver.failed_steps) == 3
    driver.assert_exact(1, 2, 3)


@pytest.mark.parametrize("steps", [1, 2])
def test_each_further_one_costs_two_epochs_more(steps: int):
    driver = FailingWorkers(poisoned_by(2, 4, 6), max_steps_in_flight=steps)
    for group in range(1, 8):
        driver.add(group, max_tokens=6)
    driver.run()
    assert {group for group, _ in driver.ends if driver.reason(group) is ERROR} == {2, 4, 6}
    assert len(driver.failed_steps) <= 7
    driver.assert_exact(1, 3, 5, 7)


def test_suspects_get_their_turn_though_other_replicas_keep_steps_coming():
    # There is always a step in flight, but it is empty.
    driver = FailingWorkers(poisoned_by(2), max_steps_in_flight=2)
    for group in range(1, 5):
        driver.add(group, max_tokens=6)
    for _ in range(1000):
        while driver.plan() or driver.plan_empty():
            pass
        driver.deliver()
    assert not driver.core.has_work
    assert driver.reason(2) is ERROR
    assert len(driver.failed_steps) == 3
    assert driver.failed_steps[2] == {2}
    driver.assert_exact(1, 3, 4)


def test_choices_share_a_prompt_and_its_fate():
    driver = FailingWorkers(poisoned_by(2))
    driver.add(1, max_tokens=8)
    driver.add(2, choices=3)
    driver.run()
    assert len(driver.failed_steps) == 3
    assert [driver.reason(2, choice) for choice in range(3)] == [ERROR] * 3
    driver.assert_exact(1)


def test_one_that_has_the_workers_for_itself_gets_three_tries():
    driver = FailingWorkers(poisoned_by(1))
    driver.add(1)
    driver.run()
    assert len(driver.failed_steps) == 3
    assert driver.reason(1) is ERROR


def test_the_first_failure_isolates_nobody():
    # Workers may also die of other causes.
    driver = FailingWorkers(lambda keys: False)
    for group in (1, 2, 3):
        driver.add(group)
    driver.plan()
    assert driver.fail() == 0
    plan = driver.plan()
    assert plan is not None
    assert len(plan.new_rows) == 3
    driver.run()
    driver.assert_exact(1, 2, 3)


def test_failures_with_progress_in_between_are_not_in_a_row():
    driver = FailingWorkers(lambda keys: False, max_steps_in_flight=2, max_num_batched_tokens=256)
    for group in (1, 2, 3):
        driver.add(group, max_tokens=60)
    for _ in range(25):
        driver.plan()
        driver.plan()
        driver.deliver()
        driver.deliver()
        driver.plan()
        assert driver.fail() == 0
    driver.run()
    driver.assert_exact(1, 2, 3)


def test_epochs_that_end_otherwise_are_nobodys_fault():
    driver = FailingWorkers(lambda keys: False)
    for group in (1, 2, 3):
        driver.add(group)
    for _ in range(10):
        driver.plan()
        driver.fail(in_step=False)
    # No request is to blame if workers die while nothing is computed.
    for _ in range(10):
        assert driver.fail() == 0
    plan = driver.plan()
    assert plan is not None
    assert len(plan.new_rows) == 3
    driver.run()
    driver.assert_exact(1, 2, 3)


def test_a_lost_connection_while_one_is_alone_does_not_end_it():
    driver = FailingWorkers(lambda keys: False)
    for group in (1, 2):
        driver.add(group)
    for expected in (0, 2):
        driver.plan()
        assert driver.fail() == expected
    for _ in range(5):
        driver.plan()
        assert len(driver.in_flight[0][0]) == 1
        driver.fail(in_step=False)
    driver.run()
    driver.assert_exact(1, 2)


def test_workers_that_fail_at_batches_alone_still_get_everybody_to_the_end():
    # A kernel that fails on two rows or more: no request is the culprit; each round of tests gives every one a token.
    driver = FailingWorkers(lambda keys: len(keys) > 1)
    for group in range(1, 5):
        driver.add(group, max_tokens=6)
    driver.run()
    driver.assert_exact(1, 2, 3, 4)


@pytest.mark.parametrize("steps", [1, 3])
def test_one_that_is_cancelled_while_alone_leaves_its_failure_to_nobody(steps: int):
    driver = FailingWorkers(lambda keys: False, max_steps_in_flight=steps)
    for group in (1, 2, 3):
        driver.add(group, 12, max_tokens=30)
    for expected in (0, 3):
        driver.plan()
        assert driver.fail() == expected
    driver.plan()
    ((alone, _),) = driver.in_flight[0][0]
    driver.cancel(alone)
    # Its step is still in flight: a request that joined now would be taken for the culprit.
    assert driver.schedule() is None
    assert driver.fail() == 2
    driver.run()
    driver.assert_exact(*{1, 2, 3} - {alone})


def test_who_comes_meanwhile_waits_for_its_turn():
    driver = FailingWorkers(lambda keys: False)
    for group in (1, 2):
        driver.add(group)
    for expected in (0, 2):
        driver.plan()
        assert driver.fail() == expected
    driver.add(3)
    tested = []
    for _ in range(2):
        driver.plan()
        tested.append({group for group, _ in driver.in_flight[0][0]})
        driver.deliver()
    assert tested == [{2}, {1}]
    driver.plan()
    assert {group for group, _ in driver.in_flight[0][0]} == {1, 2, 3}
    driver.run()
    driver.assert_exact(1, 2, 3)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_the_load_few_epochs_are_lost_and_only_culprits_end(seed: int, tmp_path: Path):
    choose = Random(seed)
    culprits = set(choose.sample(range(1, 13), choose.choice([0, 1, 1, 2, 3])))
    driver = FailingWorkers(
        poisoned_by(*culprits),
        num_blocks=choose.randint(16, 60),
        max_num_seqs=choose.randint(1, 8),
        max_num_batched_tokens=choose.choice([2, 8, 64]),
        max_steps_in_flight=choose.choice([1, 2, 4]),
        enable_prefix_caching=choose.random() < 0.7,
        preemption_mode=choose.choice(["recompute", "swap"]),
        num_swap_blocks=20,
    )
    # Small files, so that one begins in the middle of the run.
    writer = RecordingWriter(tmp_path / "trace", 1 << choose.randint(11, 14), 0)
    driver.core = RecordedCore(driver.settings, writer)
    cancelled = set()
    for group in range(1, 13):
        driver.add(group, choose.randint(1, 20), max_tokens=choose.randint(1, 20), choices=choose.choice([1, 1, 3]))
        for _ in range(choose.choice([0, 0, 3])):
            if driver.plan() is None and driver.in_flight:
                driver.deliver()
        if choose.random() < 0.1:
            cancelled |= {key[0] for key in driver.cancel(group)}
    driver.run()
    live = {group for group in driver.requests if group not in cancelled}
    # Fewer steps fail if several culprits run at the same time.
    assert len(driver.failed_steps) <= 3 * len(culprits)
    assert {group for group in live if driver.reason(group) is ERROR} == culprits & live
    driver.assert_exact(*live - culprits)
    writer.close()
    for replayed in replay(tmp_path.iterdir()):
        assert replayed.difference is None
