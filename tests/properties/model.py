"""A test's model of each sequence and plan, derived only from its calls to the core and the answers."""

from dataclasses import dataclass, field
from math import inf

from scheduler.core.messages import ChoiceStart, CoreSettings, GroupRequest, Plan, Result, SequenceKey
from tests.fakes.model import Output

Order = tuple[float, int, int]


@dataclass(slots=True, eq=False)
class ModelSequence:
    request: GroupRequest
    start: ChoiceStart
    # The lowest is served first.
    order: Order
    # Its whole output, known from the start.
    expected: Output
    # Tokens delivered, including those it was resumed with.
    tokens: list[int] = field(default_factory=list)
    is_live: bool = True
    has_run: bool = False
    # None while it waits.
    row: int | None = None
    generation: int | None = None
    is_swapped: bool = False
    num_preemptions: int = 0
    # Tokens delivered when it was last preempted for lack of blocks.
    num_tokens_when_preempted: int = -1
    # Prompt tokens found in the cache when it first ran.
    num_cached_tokens: int = 0
    # Forced tokens came while another step of it was in flight: it waits for that step's result.
    waits: bool = False
    # It must have ended by the time this many plans have been made.
    last_plan: float = inf

    @property
    def key(self) -> SequenceKey:
        return self.request.group, self.start.choice

    @property
    def tenant(self) -> str:
        return self.request.tenant

    @property
    def is_running(self) -> bool:
        return self.row is not None

    @property
    def is_protected(self) -> bool:
        """It was preempted for lack of blocks and has received no token since."""
        return self.num_tokens_when_preempted >= len(self.tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.tokens)

    @property
    def max_num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + self.request.stop.max_tokens

    def leave_row(self) -> None:
        self.row = self.generation = None
        self.waits = False


@dataclass(frozen=True, slots=True)
class Flight:
    """A plan whose result has not been delivered."""

    plan: Plan
    result: Result
    # Rows in the plan's batch.
    rows: frozenset[int]


def age_of(settings: CoreSettings, now: float) -> int:
    """The priority numbers by which a request that came at time 0 has moved ahead of one that comes now."""
    return int(now // settings.priority_aging) if settings.priority_aging else 0


def order_of(settings: CoreSettings, request: GroupRequest, arrival: int, index: int, now: float) -> Order:
    """Place in the scheduling order. index: the choice's position within its request. now: when it comes."""
    match settings.scheduling_policy:
        case "priority":
            first = request.priority + age_of(settings, now)
        case "deadline":
            first = inf if request.deadline is None else request.deadline
        case _:
            first = 0
    return first, arrival, index


def sequences_of(
    settings: CoreSettings, request: GroupRequest, outputs: dict[int, Output], now: float
) -> list[ModelSequence]:
    """Sequences of a group that comes now; its number says how many came before. outputs: by choice."""
    return [
        ModelSequence(
            request,
            start,
            order_of(settings, request, request.group, index, now),
            outputs[start.choice],
            tokens=list(start.output_token_ids),
        )
        for index, start in enumerate(request.choices)
    ]


def work_of(sequence: ModelSequence, settings: CoreSettings) -> int:
    """Upper bound on the plans that compute something for a sequence until it ends.

    Each of them computes a token that the same stay has not computed yet: a known token, the next one, or, in steps in
    flight, one past an end that the core does not know of yet. So a stay takes at most as many plans as the sequence
    can have tokens, plus max_steps_in_flight. The sequence gets at least one token between two preemptions, so it has
    at most one stay for each token still to come, plus one.
    """
    stays = sequence.request.stop.max_tokens - len(sequence.tokens) + 1
    return stays * stay_of(sequence, settings)


def stay_of(sequence: ModelSequence, settings: CoreSettings) -> int:
    """Upper bound on the plans of one stay."""
    return sequence.max_num_tokens + settings.max_steps_in_flight


def plans_between(settings: CoreSettings) -> int:
    """Upper bound on the plans made for each plan that advances the first sequences in order, that plan included.

    If nothing may overtake, every plan that can hold the first in order does: plans without them are made only while
    all of them are in flight. If prefills are bounded in length, share a step, overtake each other or go before
    decodes, later sequences may fill steps by themselves until all of those that hold rows have ended.
    """
    in_order = (
        settings.enable_chunked_prefill
        and settings.max_num_partial_prefills == 1
        and not settings.long_prefill_token_threshold
    )
    passing = 0 if in_order else settings.max_num_seqs * settings.max_model_len
    return settings.max_steps_in_flight * (1 + passing)


def bound_plans(settings: CoreSettings, live: list[ModelSequence], new: list[ModelSequence], num_plans: int) -> None:
    """Sets the plan by which each new sequence must have ended, and postpones that of sequences the new ones overtake.

    live: all sequences, new ones included.
    """
    factor = plans_between(settings)
    for each in new:
        each.last_plan = num_plans + factor * sum(work_of(other, settings) for other in live)
    for earlier in live:
        if earlier not in new:
            ahead = [each for each in new if each.order < earlier.order or each.tenant != earlier.tenant]
            earlier.last_plan += factor * sum(work_of(each, settings) for each in ahead)
