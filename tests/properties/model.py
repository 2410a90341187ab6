"""What a test knows of each sequence and each plan, from nothing but what it said to the core and was told by it."""

from dataclasses import dataclass, field
from math import inf

from scheduler.core.messages import ChoiceStart, CoreSettings, GroupRequest, Plan, Result, SequenceKey
from tests.fakes.model import Output

Order = tuple[float, int, int]


@dataclass(slots=True, eq=False)
class ModelSequence:
    request: GroupRequest
    start: ChoiceStart
    # The lowest goes first.
    order: Order
    # All it is to say, known from the start.
    expected: Output
    # Delivered, those it was resumed with included.
    tokens: list[int] = field(default_factory=list)
    is_live: bool = True
    has_run: bool = False
    # None: it waits.
    row: int | None = None
    generation: int | None = None
    is_swapped: bool = False
    num_preemptions: int = 0
    # Tokens delivered when it was last preempted for want of blocks.
    num_tokens_when_preempted: int = -1
    # Prompt tokens found in the cache when it first ran.
    num_cached_tokens: int = 0
    # Plans made when it must have ended, at the latest.
    last_plan: float = inf

    @property
    def key(self) -> SequenceKey:
        return self.request.group, self.start.choice

    @property
    def is_running(self) -> bool:
        return self.row is not None

    @property
    def is_protected(self) -> bool:
        """Has been preempted for want of blocks, and has got no token since."""
        return self.num_tokens_when_preempted >= len(self.tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.tokens)

    @property
    def max_num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + self.request.stop.max_tokens

    def leave_row(self) -> None:
        self.row = self.generation = None


@dataclass(frozen=True, slots=True)
class Flight:
    """A plan whose result has not been delivered."""

    plan: Plan
    result: Result
    # In its batch.
    rows: frozenset[int]


def order_of(settings: CoreSettings, request: GroupRequest, arrival: int, index: int) -> Order:
    """index: of the choice, within its request."""
    match settings.scheduling_policy:
        case "priority":
            first = request.priority
        case "deadline":
            first = inf if request.deadline is None else request.deadline
        case _:
            first = 0
    return first, arrival, index


def sequences_of(settings: CoreSettings, request: GroupRequest, outputs: dict[int, Output]) -> list[ModelSequence]:
    """Of a group that is new; its number says when it came. outputs: by choice."""
    return [
        ModelSequence(
            request,
            start,
            order_of(settings, request, request.group, index),
            outputs[start.choice],
            tokens=list(start.output_token_ids),
        )
        for index, start in enumerate(request.choices)
    ]


def work_of(sequence: ModelSequence, settings: CoreSettings) -> int:
    """Plans that compute something for a sequence, at most, until it ends.

    Each of them computes a token of it that the same stay has not computed before: a token it knows, the next one, or,
    of steps in flight, one past an end that the core does not know of yet. So a stay takes as many plans as the
    sequence can have tokens, and max_steps_in_flight more. Between two preemptions it gets a token, so that it has no
    more stays than tokens to get, and the first.
    """
    stays = sequence.request.stop.max_tokens - len(sequence.tokens) + 1
    return stays * stay_of(sequence, settings)


def stay_of(sequence: ModelSequence, settings: CoreSettings) -> int:
    """Plans in one stay, at most."""
    return sequence.max_num_tokens + settings.max_steps_in_flight


def plans_between(settings: CoreSettings) -> int:
    """Plans of later sequences only that may come, at most, for each plan of one of the first in order, and itself.

    Where nobody passes, the first in order are in every plan that can hold them: only while all of them are in flight
    is there one without. Where prefills are bounded in length, share a step, pass each other or go before decodes,
    later ones may have the step to themselves until all of those that hold rows have ended.
    """
    in_order = (
        settings.enable_chunked_prefill
        and settings.max_num_partial_prefills == 1
        and not settings.long_prefill_token_threshold
    )
    passing = 0 if in_order else settings.max_num_seqs * settings.max_model_len
    return settings.max_steps_in_flight * (1 + passing)


def bound_plans(settings: CoreSettings, live: list[ModelSequence], new: list[ModelSequence], num_plans: int) -> None:
    """By when the new ones must have ended, and how much later those whom they pass. live: all of them."""
    factor = plans_between(settings)
    for each in new:
        each.last_plan = num_plans + factor * sum(work_of(other, settings) for other in live)
    for earlier in live:
        if earlier not in new:
            ahead = [each for each in new if each.order < earlier.order]
            earlier.last_plan += factor * sum(work_of(each, settings) for each in ahead)
