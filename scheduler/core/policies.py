"""Scheduling policies: the order of requests, the chunks of prefills, and the choice of sequences to preempt."""

from collections.abc import Callable
from math import inf
from typing import Protocol

from scheduler.core.messages import CoreSettings, GroupRequest
from scheduler.core.pacing.pace import StepLimit
from scheduler.core.state.request import Sequence
from scheduler.core.state.running import Running

# Arguments: the request, its arrival number, and the priority numbers by which earlier requests have moved ahead of it.
OrderPolicy = Callable[[GroupRequest, int, int], tuple[float, int]]


def fcfs(request: GroupRequest, arrival: int, age: int) -> tuple[float, int]:
    """First come, first served."""
    return 0, arrival


def priority(request: GroupRequest, arrival: int, age: int) -> tuple[float, int]:
    """The lowest priority number first, then first come. `age` is that of `age_of`."""
    return request.priority + age, arrival


def age_of(now: float, settings: CoreSettings) -> int:
    """The number added to the priority of a request that comes now: it grows by 1 every priority_aging seconds.

    So a request that waits gets ahead of later ones by one priority number in that time, and none waits forever. That
    all of them age alike makes the order of two requests constant.
    """
    return int(now // settings.priority_aging) if settings.priority_aging else 0


def deadline(request: GroupRequest, arrival: int, age: int) -> tuple[float, int]:
    """The earliest deadline first (Liu and Layland, 1973); those without one last; then first come."""
    return inf if request.deadline is None else request.deadline, arrival


ORDER_POLICIES: dict[str, OrderPolicy] = {"fcfs": fcfs, "priority": priority, "deadline": deadline}


class Chunking:
    """Divides the token budget that decodes leave in a step among prefills, in the order of the calls to `bound`.

    At most max_num_partial_prefills prefills stay unfinished, and at most max_long_partial_prefills of those are long.
    Each gets an equal share of the rest; what a short one does not need goes to those behind it.
    """

    def __init__(
        self, settings: CoreSettings, budget: int, num_candidates: int, limit: StepLimit | None = None
    ) -> None:
        """limit: the time that the step has for prefills; None: any."""
        self._settings = settings
        self.budget, self.limit = budget, limit
        self._num_partial = self._num_long = 0
        self._most_partial = max(1, min(settings.max_num_partial_prefills, num_candidates))

    def is_long(self, num_tokens: int) -> bool:
        threshold = self._settings.long_prefill_token_threshold
        return bool(threshold) and num_tokens > threshold

    def bound(self, num_missing: int, num_tokens: int) -> int:
        """How many tokens this step computes of a prefill of num_tokens that lacks num_missing; may be 0."""
        settings = self._settings
        if not settings.enable_chunked_prefill:
            whole = min(num_missing, settings.max_num_batched_tokens)
            return whole if whole <= self.budget else 0
        budget = self.budget
        if self.limit is not None:
            budget = min(budget, self.limit.num_tokens(num_tokens - num_missing))
        count = min(num_missing, budget)
        if self._num_partial < self._most_partial:
            count = min(count, -(-budget // (self._most_partial - self._num_partial)))
        if self.is_long(num_tokens):
            count = min(count, settings.long_prefill_token_threshold)
        return count if count == num_missing or self.may_leave_unfinished(num_tokens) else 0

    def passes(self, num_tokens: int) -> bool:
        """True if prefills behind this one may overtake it, because only its length keeps it out."""
        settings = self._settings
        return (
            settings.max_long_partial_prefills < settings.max_num_partial_prefills
            and self.is_long(num_tokens)
            and self._num_long >= settings.max_long_partial_prefills
        )

    def spend(self, count: int, num_missing: int, num_tokens: int) -> None:
        """Records that the step computes `count` tokens of this prefill."""
        self.budget -= count
        if self.limit is not None:
            self.limit.spend(count, num_tokens - num_missing)
            # Tokens at the beginning of a prompt take the least time.
            self.budget = min(self.budget, self.limit.num_tokens(0))
        if count < num_missing:
            self._num_partial += 1
            self._num_long += self.is_long(num_tokens)

    def may_leave_unfinished(self, num_tokens: int) -> bool:
        """True if this step may compute only a part of what a prefill of num_tokens lacks."""
        settings = self._settings
        if self._num_partial >= settings.max_num_partial_prefills:
            return False
        return not self.is_long(num_tokens) or self._num_long < settings.max_long_partial_prefills


class PreemptionPolicy(Protocol):
    def victim(self, sequence: Sequence, running: Running) -> Sequence | None:
        """The sequence to preempt so that the running `sequence` can go on. None: `sequence` sits this step out, while
        another one makes progress."""
        ...

    def num_tokens_on_return(self, num_tokens: int, num_in_first_step: int) -> int:
        """The number of tokens for which a returning sequence takes blocks at once. Of its num_tokens,
        num_in_first_step are computed by its first step or are there already."""
        ...

    def headroom(self, running: Running) -> int:
        """Blocks that must stay free when a sequence is admitted."""
        ...


class WholeContext:
    """A returning sequence takes blocks for its whole context, and is not preempted until it has got a token.

    Otherwise it may lose its blocks again and again on the way (vllm#25538, vllm#52520). An admitted sequence also
    leaves one block free for each running sequence that will need more, which happens within block_size steps;
    otherwise the newest sequence is soon preempted. benchmarks/scheduler/preemption_rules.py compares both rules: this
    one has a sixth of FirstChunk's preemptions.
    """

    def victim(self, sequence: Sequence, running: Running) -> Sequence | None:
        found_protected = False
        for candidate in running.from_last():
            if not _is_protected(candidate, running):
                # All sequences behind this one are protected: it waits while one of them makes progress.
                return None if candidate is sequence and found_protected else candidate
            found_protected = True
            if candidate is sequence:
                # It is protected itself: the token that it came back for is in flight.
                return None
        raise AssertionError("the sequence does not run")

    def num_tokens_on_return(self, num_tokens: int, num_in_first_step: int) -> int:
        return num_tokens

    def headroom(self, running: Running) -> int:
        return running.num_growing


class FirstChunk:
    """vLLM V1's rule, for comparison: the last in order is preempted, even if it has got no token since it came back,
    and returns as soon as there are blocks for its first chunk."""

    def victim(self, sequence: Sequence, running: Running) -> Sequence | None:
        return next(running.from_last())

    def num_tokens_on_return(self, num_tokens: int, num_in_first_step: int) -> int:
        return num_in_first_step

    def headroom(self, running: Running) -> int:
        return 0


def _is_protected(sequence: Sequence, running: Running) -> bool:
    """True if the sequence was preempted and has got no token since. To get one, it needs no more blocks."""
    if sequence.num_tokens_when_preempted < 0:
        return False
    known = running.num_known(sequence)
    return known <= sequence.num_tokens_when_preempted


PREEMPTION_POLICIES: dict[str, PreemptionPolicy] = {"whole_context": WholeContext(), "first_chunk": FirstChunk()}
