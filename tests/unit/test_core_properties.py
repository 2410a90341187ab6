"""Random work against the fake worker: what comes out must not depend on any scheduling decision."""

from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler.messages import (
    ChoiceStart,
    CoreSettings,
    FinishReason,
    GroupRequest,
    Plan,
    RejectReason,
    Result,
    SequenceKey,
    StopRules,
)
from tests.fakes.model import VOCAB_SIZE, generate
from tests.support.core import CoreDriver, make_request

EOS = frozenset({0})
TOKENS = st.integers(0, VOCAB_SIZE - 1)
# Few beginnings, so that prefixes meet.
PROMPTS = st.builds(
    lambda base, length, tail: tuple((base * 7 + i) % VOCAB_SIZE for i in range(length)) + tuple(tail),
    st.integers(0, 1),
    st.integers(0, 14),
    st.lists(TOKENS, min_size=1, max_size=6),
)
STOPS = st.builds(
    lambda max_tokens, min_tokens, stop_ids, ignore_eos: StopRules(
        max_tokens=max_tokens,
        min_tokens=min(min_tokens, max_tokens),
        stop_token_ids=frozenset(stop_ids),
        ignore_eos=ignore_eos,
    ),
    st.integers(1, 14),
    st.sampled_from([0, 0, 5]),
    st.sets(TOKENS, max_size=1),
    st.booleans(),
)
OUTPUTS = st.one_of(st.just(()), st.just(()), st.lists(TOKENS, max_size=9).map(tuple))


@dataclass(frozen=True)
class Submission:
    prompt: tuple[int, ...]
    stop: StopRules
    outputs: list[tuple[int, ...]]  # of each choice, so far
    priority: int
    salt: str
    bypass: bool
    seconds: float | None  # until the deadline


SUBMISSIONS = st.builds(
    Submission,
    prompt=PROMPTS,
    stop=STOPS,
    outputs=st.lists(OUTPUTS, min_size=1, max_size=3),
    priority=st.integers(-1, 1),
    salt=st.sampled_from(["", "", "s"]),
    bypass=st.sampled_from([False, False, True]),
    seconds=st.one_of(st.none(), st.none(), st.none(), st.floats(0, 20)),
)


class CoreMachine(RuleBasedStateMachine):
    """Submissions, cancels, deadlines and losses come at any point, with a plan in flight or without."""

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        capacity=st.integers(20, 44),
        max_num_seqs=st.integers(1, 6),
        budget=st.sampled_from([1, 3, 5, 8, 64]),
        caching=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority"]),
        max_queued=st.sampled_from([(5, 60), (1000, 100_000)]),
    )
    def start(
        self,
        block_size: int,
        capacity: int,
        max_num_seqs: int,
        budget: int,
        caching: bool,
        policy: str,
        max_queued: tuple[int, int],
    ) -> None:
        self.driver = CoreDriver(
            block_size=block_size,
            num_blocks=capacity // block_size,
            max_model_len=36,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            enable_prefix_caching=caching,
            scheduling_policy=policy,
            eos_token_ids=EOS,
            max_queued_requests=max_queued[0],
            max_queued_tokens=max_queued[1],
        )
        self.now = 0.0
        self.requests: dict[int, GroupRequest] = {}
        self.deadlines: dict[int, float] = {}
        self.cancelled: set[SequenceKey] = set()
        self.in_flight: tuple[Plan, Result] | None = None

    @property
    def core_settings(self) -> CoreSettings:
        return self.driver.settings

    def live(self) -> set[SequenceKey]:
        return self.driver.tokens.keys() - self.driver.ends.keys() - self.cancelled

    @rule(submissions=st.lists(SUBMISSIONS, min_size=1, max_size=4))
    def submit(self, submissions: list[Submission]) -> None:
        for submission in submissions:
            self.submit_one(submission)

    def submit_one(self, new: Submission) -> None:
        group = len(self.requests) + 1
        request = make_request(
            group,
            new.prompt,
            stop=new.stop,
            choices=[ChoiceStart(choice=choice, output_token_ids=ids) for choice, ids in enumerate(new.outputs)],
            priority=new.priority,
            cache_salt=new.salt,
            bypass_prefix_cache=new.bypass,
            deadline=None if new.seconds is None else self.now + new.seconds,
            # KV of one salt must never serve another; nor KV of one group, if nothing is cached.
            sampling=len(new.salt) if self.core_settings.enable_prefix_caching else group,
        )
        self.requests[group] = request
        rejection = self.driver.submit(request, self.now)
        if rejection is None:
            if request.deadline is not None:
                self.deadlines[group] = request.deadline
        else:
            capacity = self.driver.worker.num_blocks * self.core_settings.block_size
            can_fit = len(new.prompt) + new.stop.max_tokens <= min(self.core_settings.max_model_len, capacity + 1)
            assert (rejection.reason is RejectReason.QUEUE_FULL) == can_fit

    @rule()
    def half_a_step(self) -> None:
        """What comes before the next half finds a plan in flight."""
        if self.in_flight is not None:
            (plan, result), self.in_flight = self.in_flight, None
            outputs = self.driver.apply(plan, result, self.now)
            assert not {output.key for output in outputs} & self.cancelled
        else:
            has_work = self.driver.core.has_work
            self.in_flight = self.driver.schedule(self.now)
            assert (self.in_flight is not None) == has_work, "an empty step while something waits"

    @rule(count=st.integers(1, 12))
    def several_steps(self, count: int) -> None:
        for _ in range(2 * count):
            self.half_a_step()

    @precondition(lambda self: self.live())
    @rule(data=st.data(), whole_group=st.sampled_from([False, False, True]))
    def cancel(self, data: st.DataObject, whole_group: bool) -> None:
        group, choice = data.draw(st.sampled_from(sorted(self.live())))
        expected = {key for key in self.live() if key[0] == group and (whole_group or key[1] == choice)}
        cancelled = self.driver.core.cancel(group, None if whole_group else [choice], self.now)
        assert set(cancelled) == expected
        self.cancelled |= expected

    @rule(seconds=st.floats(0, 5), loses_workers=st.booleans(), new_capacity=st.one_of(st.none(), st.integers(20, 44)))
    def time_passes(self, seconds: float, loses_workers: bool, new_capacity: int | None) -> None:
        self.now += seconds
        due = {group for group, deadline in self.deadlines.items() if deadline <= self.now}
        expected = {key for key in self.live() if key[0] in due}
        assert set(self.driver.core.expire(self.now)) == expected
        self.cancelled |= expected
        if loses_workers:
            self.lose_workers(new_capacity)

    def lose_workers(self, new_capacity: int | None) -> None:
        stale, self.in_flight = self.in_flight, None
        before = self.driver.core.stats.num_preemptions
        self.driver.lose_workers(new_capacity and new_capacity // self.core_settings.block_size, self.now)
        assert self.driver.core.stats.num_preemptions == before
        if stale is not None:
            assert self.driver.core.apply(*stale, self.now) == []

    @invariant()
    def agrees_with_itself(self) -> None:
        if hasattr(self, "driver"):
            core = self.driver.core
            core.check_integrity()
            assert core.load.num_running + core.load.num_waiting == len(self.live())

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        if self.in_flight is not None:
            self.half_a_step()
        # While the first in order waits nobody comes in, so those that run bring it closer with each token; while it
        # runs it advances unless others take the whole budget, and these end too.
        remaining = len(self.live()) * self.core_settings.max_model_len
        self.driver.finish(max_steps=2 * len(self.live()) * remaining)
        for key, tokens in self.driver.tokens.items():
            self.check_output(key, tokens)

    def check_output(self, key: SequenceKey, tokens: list[int]) -> None:
        request = self.requests[key[0]]
        start = next(start for start in request.choices if start.choice == key[1])
        scope = request.sampling
        assert isinstance(scope, int)
        reference, reason = generate(request.prompt_token_ids, start.output_token_ids, key[1], request.stop, EOS, scope)
        end = self.driver.ends.get(key)
        if end is None or end.finish_reason is FinishReason.ERROR:
            # Cancelled, or too long for the blocks that workers came back with: a beginning of it.
            assert (key in self.cancelled) or (end is not None and "KV blocks" in end.message)
            assert tokens == reference[: len(tokens)]
        else:
            assert (tokens, end.finish_reason) == (reference, reason)


TestCoreProperties = CoreMachine.TestCase
TestCoreProperties.settings = settings(
    max_examples=120,
    stateful_step_count=50,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
