"""Random work that Hypothesis chooses, and shrinks when a check of tests/properties/world.py fails."""

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler.core.messages import ChoiceStart, CoreSettings, GroupRequest, StopRules
from tests.fakes.items import item_span
from tests.fakes.model import VOCAB_SIZE, FakeSampling
from tests.properties.state_checks import check
from tests.properties.workloads import EOS, MAX_MODEL_LEN, SPECULATIONS, step_costs
from tests.properties.world import World

TOKENS = st.integers(0, VOCAB_SIZE - 1)
# Few different beginnings, so that prompts share prefixes.
PROMPTS = st.builds(
    lambda base, length, tail: tuple((base * 7 + i) % VOCAB_SIZE for i in range(length)) + tuple(tail),
    st.integers(0, 1),
    st.integers(0, 20),
    st.lists(TOKENS, min_size=1, max_size=6),
)
STOPS = st.builds(
    lambda max_tokens, min_tokens, stop_ids, ignore_eos: StopRules(
        max_tokens=max_tokens,
        min_tokens=min(min_tokens, max_tokens),
        stop_token_ids=frozenset(stop_ids),
        ignore_eos=ignore_eos,
    ),
    st.integers(1, 16),
    st.sampled_from([0, 0, 5]),
    st.sets(TOKENS, max_size=1),
    st.booleans(),
)
CHOICES = st.lists(
    st.one_of(st.just(()), st.just(()), st.lists(TOKENS, max_size=9).map(tuple)), min_size=1, max_size=3
).map(lambda outputs: tuple(ChoiceStart(choice=i, output_token_ids=ids) for i, ids in enumerate(outputs)))


@st.composite
def core_settings(draw: st.DrawFn) -> CoreSettings:
    block_size = draw(st.sampled_from([4, 2, 1]))
    is_chunked = draw(st.sampled_from([True, True, True, False]))
    num_partial = draw(st.integers(1, 3)) if is_chunked else 1
    mode = draw(st.sampled_from(["recompute", "swap"]))
    queued = draw(st.sampled_from([(1000, 100_000), (5, 60)]))
    return CoreSettings(
        block_size=block_size,
        num_blocks=draw(st.integers(20, 48)) // block_size,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.sampled_from([64, 8, 5, 3, 1] if is_chunked else [64, 16, 8])),
        eos_token_ids=EOS,
        enable_prefix_caching=draw(st.booleans()),
        scheduling_policy=draw(st.sampled_from(["fcfs", "priority", "deadline"])),
        priority_aging=draw(st.sampled_from([0.0, 1.0])),
        enable_chunked_prefill=is_chunked,
        long_prefill_token_threshold=draw(st.sampled_from([0, 2, 5])) if is_chunked else 0,
        max_num_partial_prefills=num_partial,
        max_long_partial_prefills=draw(st.integers(1, num_partial)),
        inter_token_latency_target=draw(st.sampled_from([0.0, 0.0, 0.6])),
        least_prefill_tokens=draw(st.integers(1, 4)),
        preemption_mode=mode,
        num_swap_blocks=draw(st.sampled_from([40, 6, 0])) if mode == "swap" else 0,
        max_steps_in_flight=draw(st.integers(1, 4)),
        num_stages=draw(st.integers(1, 3)),
        speculation=draw(st.sampled_from(SPECULATIONS)),
        max_queued_requests=queued[0],
        max_queued_tokens=queued[1],
        encoder_cache_size=draw(st.sampled_from([0, 9, 20])),
        max_num_encoder_input_tokens=draw(st.sampled_from([1, 8])),
    )


class CoreMachine(RuleBasedStateMachine):
    """Submissions, cancels, deadlines, failures and losses come at any point, with plans in flight or without."""

    @initialize(core_settings=core_settings(), seed=st.integers(0, 2**16))
    def start(self, core_settings: CoreSettings, seed: int) -> None:
        self.world = World(core_settings, seed=seed)

    @rule(
        prompt=PROMPTS,
        choices=CHOICES,
        stop=STOPS,
        priority=st.integers(-1, 1),
        salt=st.sampled_from(["", "", "s"]),
        bypass=st.sampled_from([False, False, True]),
        seconds=st.one_of(st.none(), st.none(), st.floats(0, 20)),
        count=st.sampled_from([1, 1, 3]),
        tenant=st.sampled_from(["", "a", "b"]),
        items=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), max_size=2),
    )
    def submit(
        self,
        prompt: tuple[int, ...],
        choices: tuple[ChoiceStart, ...],
        stop: StopRules,
        priority: int,
        salt: str,
        bypass: bool,
        seconds: float | None,
        count: int,
        tenant: str,
        items: list[tuple[int, int]],
    ) -> None:
        """items: each one's index, and its distance from the one before."""
        spans, end = [], 0
        for index, distance in items:
            span = item_span(index, end + distance)
            end = span.end
            if end <= len(prompt):
                spans.append(span)
        for _ in range(count):
            group = self.world.num_groups + 1
            # KV of one salt must never serve another; without prefix caching, nor KV of one group.
            scope = len(salt) if self.world.settings.enable_prefix_caching else group
            request = GroupRequest(
                group=group,
                request_id=f"request-{group}",
                prompt_token_ids=prompt,
                choices=choices,
                stop=stop,
                sampling=FakeSampling(scope=scope, seed=group % 3),
                bypass_prefix_cache=bypass,
                priority=priority,
                cache_salt=salt,
                deadline=None if seconds is None else self.world.now + seconds,
                tenant=tenant,
                items=tuple(spans) if self.world.settings.encoder_cache_size else (),
            )
            self.world.submit(request)

    @rule(failing=st.sampled_from([False] * 7 + [True]), num_drafts=st.integers(0, 3), is_right=st.booleans())
    def schedule(self, failing: bool, num_drafts: int, is_right: bool) -> None:
        count = num_drafts if self.world.settings.speculation else 0

        def guess(true_tokens: list[int]) -> tuple[int, ...]:
            return tuple(
                true_tokens[:count] if is_right else [(token + 1) % VOCAB_SIZE for token in true_tokens[:count]]
            )

        self.world.schedule(failing=failing, drafter=guess if count else None)

    @rule(share=st.sampled_from([0.0, 0.1, 0.4]))
    def set_costs(self, share: float) -> None:
        self.world.core.set_costs(step_costs(share))

    @rule()
    def schedule_empty(self) -> None:
        self.world.schedule_empty()

    @precondition(lambda self: self.world.in_flight)
    @rule(forget=st.sampled_from([False] * 15 + [True]), strays=st.booleans())
    def deliver(self, forget: bool, strays: bool) -> None:
        self.world.deliver(forget=forget, strays=strays)

    @rule(count=st.integers(2, 20))
    def several_steps(self, count: int) -> None:
        for _ in range(count):
            if not self.world.schedule() and self.world.in_flight:
                self.world.deliver()
            elif self.world.unanswered:
                self.world.answer_item(min(self.world.unanswered))

    @precondition(lambda self: self.world.unanswered)
    @rule(data=st.data(), failing=st.sampled_from([False] * 7 + [True]))
    def answer_item(self, data: st.DataObject, failing: bool) -> None:
        self.world.answer_item(data.draw(st.sampled_from(sorted(self.world.unanswered))), failing=failing)

    @precondition(lambda self: len(self.world.in_flight) > 1)
    @rule()
    def results_in_another_order(self) -> None:
        self.world.deliver_again([flight.result for flight in list(self.world.in_flight)[1:]])

    @precondition(lambda self: self.world.live)
    @rule(data=st.data(), whole_group=st.sampled_from([False, False, True]))
    def cancel(self, data: st.DataObject, whole_group: bool) -> None:
        group, choice = data.draw(st.sampled_from(sorted(self.world.live)))
        self.world.cancel(group, None if whole_group else [choice])

    @rule(seconds=st.floats(0, 5))
    def pass_time(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule(
        capacity=st.one_of(st.none(), st.integers(20, 48)),
        num_swap_blocks=st.sampled_from([0, 6, 40]),
        has_failed=st.booleans(),
    )
    def lose_workers(self, capacity: int | None, num_swap_blocks: int, has_failed: bool) -> None:
        settings = self.world.settings
        self.world.lose_workers(
            capacity and capacity // settings.block_size,
            num_swap_blocks if settings.preemption_mode == "swap" else 0,
            has_failed=has_failed,
        )

    @rule()
    def reset_prefix_cache(self) -> None:
        self.world.reset_prefix_cache()

    @rule(enabled=st.booleans())
    def watch_cache(self, enabled: bool) -> None:
        self.world.watch_cache(enabled)

    @invariant()
    def agrees_with_itself(self) -> None:
        if hasattr(self, "world"):
            check(self.world)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()


TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
