"""Decoding sequences get drafts where they pay, and take nothing from others for them."""

from collections import deque
from typing import Any

import pytest

from scheduler.core.drafting.drafting import Drafting
from scheduler.core.messages import Plan, Result, Speculation, StepCosts, StopRules
from tests.fakes.model import FakeSampling, generate
from tests.support.scheduler.core import CoreDriver, make_request

NGRAM = Speculation(num_speculative_tokens=4, drafters=("ngram",))
FREE = StepCosts(num_tokens=(1, 64), seconds=(1.0, 1.0))
DEAR = StepCosts(num_tokens=(1, 64), seconds=(1.0, 64.0))
# Most tokens are one more than the last: the prompt has all such pairs.
PROMPT = [*range(13), *range(6)]
SAMPLING = FakeSampling(is_predictable=True)


def driver_of(costs: StepCosts = FREE, speculation: Speculation = NGRAM, **changes: Any) -> CoreDriver:
    driver = CoreDriver(speculation=speculation, **changes)
    driver.core.set_costs(costs)
    return driver


def submit(driver: CoreDriver, group: int, *, max_tokens: int = 60, **fields: Any) -> list[int]:
    """Returns the output that it must have."""
    given: dict[str, Any] = {"sampling": SAMPLING} | fields
    request = make_request(group, PROMPT, max_tokens=max_tokens, **given)
    assert driver.submit(request) is None
    return generate(request.prompt_token_ids, (), 0, request.stop, driver.settings.eos_token_ids, SAMPLING).token_ids


def drafts_of(plan: Plan | None) -> dict[int, int]:
    assert plan is not None
    return {row: len(token_ids) for row, token_ids in plan.drafts}


@pytest.mark.parametrize("drafters", [("ngram",), ("suffix",), ("ngram", "suffix")])
@pytest.mark.parametrize("steps", [1, 2])
def test_outputs_are_the_same_in_fewer_steps(drafters: tuple[str, ...], steps: int) -> None:
    driver = driver_of(speculation=Speculation(num_speculative_tokens=4, drafters=drafters), max_steps_in_flight=steps)
    expected = {group: submit(driver, group) for group in (1, 2, 3)}
    num_steps = driver.finish()
    assert {group: driver.tokens[group, 0] for group in expected} == expected
    assert num_steps < 45
    stats = driver.core.stats
    ends = [driver.ends[group, 0] for group in expected]
    assert sum(end.num_draft_tokens for end in ends) == stats.num_draft_tokens == stats.num_speculated_tokens
    # The last accepted ones may lie behind the end.
    assert sum(end.num_accepted_tokens for end in ends) == stats.num_accepted_tokens > 20
    assert sum(stats.num_accepted_by_position) == stats.num_accepted_tokens
    timelines = [driver.core.timeline(group) for group in expected]
    told = [(each.num_draft_tokens, each.num_accepted_tokens) for each in timelines if each is not None]
    assert told == [(end.num_draft_tokens, end.num_accepted_tokens) for end in ends]


def test_none_are_planned_where_they_do_not_pay() -> None:
    driver = driver_of(DEAR)
    submit(driver, 1)
    assert driver.finish() == 60
    assert not driver.core.stats.num_drafts


@pytest.mark.parametrize("most", [0, 1, 2])
def test_a_request_bounds_its_drafts(most: int) -> None:
    driver = driver_of()
    submit(driver, 1, max_drafts=most)
    counts = set()
    while driver.core.has_work:
        counts |= set(drafts_of(driver.step()).values())
    assert max(counts, default=0) == most


def test_a_prefill_that_fits_is_whole_and_drafts_take_what_is_left() -> None:
    driver = driver_of(max_num_batched_tokens=20, enable_prefix_caching=False)
    submit(driver, 1)
    while not (drafts := drafts_of(driver.step())):
        pass
    assert drafts
    request = make_request(2, [20 + i for i in range(17)], max_tokens=9)
    driver.submit(request)
    plan = driver.step()
    assert plan is not None
    # The prefill takes 17 of 20 tokens, and the decode 1.
    assert (plan.chunks[0], plan.num_tokens) == ((1, 17), sum((17, 1)) + sum(drafts_of(plan).values()))
    assert sum(drafts_of(plan).values()) <= 2


def test_drafts_take_no_block_while_a_sequence_waits() -> None:
    driver = driver_of(num_blocks=24, enable_prefix_caching=False, max_num_seqs=2)
    for group in (1, 2, 3):
        submit(driver, group, max_tokens=20)
    while driver.core.load.num_waiting:
        before = {row: len(each.block_ids) for row, each in driver.worker.rows.items()}
        plan = driver.step()
        for row, count in drafts_of(plan).items():
            # Its own token may need one.
            assert len(driver.worker.rows[row].block_ids) - before[row] <= 1, count
    driver.finish()


def test_drafts_end_with_a_token_that_ends_the_output() -> None:
    driver = driver_of(eos_token_ids=frozenset({9}))
    expected = submit(driver, 1, stop=StopRules(max_tokens=60))
    drafted: list[tuple[int, ...]] = []
    while driver.core.has_work:
        plan = driver.step()
        assert plan is not None
        drafted += [token_ids for _, token_ids in plan.drafts]
    assert driver.tokens[1, 0] == expected
    assert drafted
    assert all(9 not in token_ids[:-1] for token_ids in drafted)


def test_only_sequences_that_draft_are_held_to_one_step() -> None:
    driver = driver_of(max_steps_in_flight=2)
    submit(driver, 1)
    submit(driver, 2, max_drafts=0)
    flights: deque[tuple[Plan, Result]] = deque()
    most_in_flight = {0: 0, 1: 0}
    num_drafts = 0
    for _ in range(40):
        while (planned := driver.schedule()) is not None:
            flights.append(planned)
            num_drafts += len(planned[0].drafts)
            for row in most_in_flight:
                named = [row in dict(plan.batch) for plan, _ in flights]
                if any(row == each for plan, _ in flights for each, _ in plan.drafts):
                    assert sum(named) == 1, "its drafts are not verified yet"
                most_in_flight[row] = max(most_in_flight[row], sum(named))
        if not flights:
            break
        driver.apply(flights.popleft()[1])
    assert num_drafts > 3
    assert most_in_flight[1] == 2


def plans_of(driver: CoreDriver, num_steps: int, num_silent: int | None = None) -> list[Plan]:
    """num_silent: the number of times that the workers' drafter is asked and proposes nothing; None: it never
    does. Later it is always right."""
    plans, num_asked = [], 0
    for _ in range(num_steps):
        plan = driver.core.schedule(0.0)
        assert plan is not None
        plans.append(plan)
        num_asked += bool(plan.wanted_drafts)
        is_silent = num_silent is None or num_asked <= num_silent
        driver.core.apply(driver.worker.run(plan, drafter=None if is_silent else tuple), 0.0)
    return plans


def wanted_of(driver: CoreDriver, num_steps: int) -> list[dict[int, int]]:
    """For each step the rows that the workers' drafter is asked to draft for, and how many tokens."""
    return [dict(plan.wanted_drafts) for plan in plans_of(driver, num_steps)]


@pytest.mark.parametrize("catches_up", [False, True])
def test_a_drafter_that_catches_up_is_asked_once_the_output_is_worth_it(catches_up: bool) -> None:
    # Drafts cost nothing, and each of the 19 tokens of the prompt takes the drafter a twelfth of a step.
    costs = StepCosts(num_tokens=(1, 20, 512), seconds=(1.0, 1.0, 818.6), draft_seconds=(0.05,) * 3)
    speculation = Speculation(num_speculative_tokens=4, workers_draft=True, workers_catch_up=catches_up)
    driver = driver_of(costs, speculation)
    submit(driver, 1)
    # It takes three steps to catch up.
    plans = plans_of(driver, 30 if catches_up else 13, num_silent=2)
    first = next(index for index, plan in enumerate(plans) if plan.wanted_drafts)
    assert (first > 6) == catches_up
    # Once it has begun, it is asked in every step.
    assert all(plan.wanted_drafts for plan in plans[first + 1 :])
    behind = [plan.num_catching_up for plan in plans[first : first + 4]]
    assert behind == ([19 + first - 5, None, None, 0] if catches_up else [0, 0, 0, 0])


def test_a_drafter_that_catches_up_is_not_asked_where_little_is_saved() -> None:
    speculation = Speculation(num_speculative_tokens=4, workers_draft=True, workers_catch_up=True)
    for seconds, is_asked in ((818.6, True), (9199.0, False)):
        costs = StepCosts(num_tokens=(1, 20, 512), seconds=(1.0, 1.0, seconds), draft_seconds=(0.05,) * 3)
        driver = driver_of(costs, speculation)
        submit(driver, 1)
        assert any(wanted_of(driver, 50)) == is_asked


@pytest.mark.parametrize("drafters", [("ngram",), ("suffix",)])
@pytest.mark.parametrize("num_steps", [5, 45])
def test_drafters_that_have_rested_know_the_tokens_that_came_meanwhile(
    drafters: tuple[str, ...], num_steps: int
) -> None:
    """Steps are dear while another sequence ends and a new one takes its row."""
    driver = driver_of(speculation=Speculation(num_speculative_tokens=4, drafters=drafters), max_num_seqs=2)
    expected = {group: submit(driver, group, max_tokens=tokens) for group, tokens in ((1, 120), (2, 6))}
    for _ in range(3):
        driver.step()
    driver.core.set_costs(DEAR)
    expected[3] = submit(driver, 3, max_tokens=90)
    before = driver.core.stats.num_drafts
    for _ in range(num_steps):
        driver.step()
    assert driver.core.stats.num_drafts == before
    driver.core.set_costs(FREE)
    rows = set[int]()
    for _ in range(8):
        rows |= set(drafts_of(driver.step()))
    assert len(rows) == 2
    accepted, planned = driver.core.stats.num_accepted_tokens, driver.core.stats.num_draft_tokens
    driver.finish()
    stats = driver.core.stats
    assert stats.num_accepted_tokens - accepted > 0.3 * (stats.num_draft_tokens - planned)
    assert {group: driver.tokens[group, 0] for group in expected} == expected


def test_few_sequences_are_probed_by_a_drafter_that_catches_up() -> None:
    # A draft takes as long as a step.
    costs = StepCosts(num_tokens=(1, 64), seconds=(1.0, 1.0), draft_seconds=(0.9, 0.9))
    num_probes = []
    for catches_up in (False, True):
        speculation = Speculation(num_speculative_tokens=4, workers_draft=True, workers_catch_up=catches_up)
        driver = driver_of(costs, speculation)
        for group in range(1, 41):
            submit(driver, group, max_tokens=70)
        num_probes.append(sum(map(len, wanted_of(driver, 300))))
    assert num_probes[0] > 20
    assert 1 <= num_probes[1] <= 3


def test_a_drafter_that_catches_up_knows_how_long_outputs_are() -> None:
    costs = StepCosts(num_tokens=(1, 20, 512), seconds=(1.0, 1.0, 818.6), draft_seconds=(0.05,) * 3)
    speculation = Speculation(num_speculative_tokens=4, workers_draft=True, workers_catch_up=True)
    asked = []
    for others in (0, 28, 4):
        driver = driver_of(costs, speculation)
        for group in range(2, 42 if others else 2):
            submit(driver, group, max_tokens=others)
            driver.finish()
        submit(driver, 1)
        asked.append(next(index for index, each in enumerate(wanted_of(driver, 50)) if each))
    # As long as nothing is known, an output has to get long first. Others of 28 tokens say at once that it pays, and
    # others of 4 that it does not before an output is much longer.
    assert asked[0] > 6
    assert asked[1] < 3
    assert asked[2] >= asked[0]


def test_a_drafter_that_should_draft_nothing_is_asked_in_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    # A draft takes as long as a step.
    costs = StepCosts(num_tokens=(1, 64), seconds=(1.0, 1.0), draft_seconds=(0.9, 0.9))
    driver = driver_of(costs, Speculation(num_speculative_tokens=4, workers_draft=True))
    num_questions, choose_wanted = 0, Drafting.choose_wanted

    def counted(self: Drafting, *args: Any) -> Any:
        nonlocal num_questions
        num_questions += 1
        return choose_wanted(self, *args)

    monkeypatch.setattr(Drafting, "choose_wanted", counted)
    submit(driver, 1)
    plans_of(driver, 50)
    # In the first ones, and then in every seventh.
    assert 5 <= num_questions <= 11
