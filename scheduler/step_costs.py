"""Measures what steps cost by their number of tokens: for the core, which decides by it how many drafts pay, and for
the step loop, which plans the next step shortly before the workers need it.
"""

import math
from dataclasses import dataclass

import numpy as np

from scheduler.core.messages import FIRST_CHOOSING_SECONDS, Plan, StepCosts

# Kernels compute rows in tiles, so that one token more may cost a fifth of a step, and the next fifteen nothing. Up to
# this many, each number of tokens has its own average; beyond, those within a factor of 2 ** (1 / 8) share one.
_MOST_ALONE, _BINS_A_DOUBLING = 64, 8
# A bin counts from this many steps on; it begins with their median, as the first steps of a process are slow.
_LEAST_STEPS = 3
# Weight of a step's time in the average of its bin and in the pace of all steps, and how far from the average a time
# may be to count in full. A slow time moves the pace, and the average hardly.
_WEIGHT, _PACE_WEIGHT, _MOST_FACTOR = 0.02, 0.3, 2.0
# A drafter that seems too dear is not measured again. So while it drafts nothing, its bins fall by this share after
# every so many steps, until it is tried again. A new time then counts for more.
_DRAFT_WEIGHT, _FALL, _STEPS_BETWEEN_FALLS = 0.1, 0.05, 512
# A step is compared with one of prefills if their numbers of tokens differ by at most this share.
_NEARLY_AS_LONG = 0.1
# Fewer tokens that the drafter lacks cost a pass of it, however many they are.
_LEAST_CATCHING_UP = 32
# The core is told when a bin has changed by this share, or a new one counts: after so many steps.
_LEAST_CHANGE, _STEPS_BETWEEN_NEWS = 0.1, 32


@dataclass(slots=True)
class _Bin:
    num_tokens: float = 0.0
    seconds: float = 0.0
    # Steps that count in the average.
    weight: float = 0.0
    # Those of the first steps, until there are enough.
    first: list[float] | None = None

    @property
    def least(self) -> float:
        """The average, or the least of the first steps' times."""
        return self.seconds or min(self.first or (0.0,))

    def note(self, num_tokens: int, seconds: float, *, of_drafter: bool = False) -> float:
        """Takes a time. Returns how many times the average it is, within bounds; 1 before there is one."""
        weight = _DRAFT_WEIGHT if of_drafter else _WEIGHT
        if self.seconds:
            factor = min(max(seconds / self.seconds, 1 / _MOST_FACTOR), _MOST_FACTOR)
            self.seconds *= factor**weight
            self.num_tokens += weight * (num_tokens - self.num_tokens)
            self.weight = min(self.weight + 1, 1 / weight)
            return factor
        self.first = sorted([*(self.first or ()), seconds])
        self.num_tokens = float(num_tokens)
        if len(self.first) >= _LEAST_STEPS:
            self.seconds, self.first = self.first[len(self.first) // 2], None
            self.weight = float(_LEAST_STEPS)
        return 1.0


class StepCostMeter:
    """Costs of steps at one pace. Where other programs slow all steps down for a while, they stay as they are: steps of
    different sizes come at different times, and a slow minute would count as the price of the sizes seen in it."""

    def __init__(self) -> None:
        self._steps: dict[int, _Bin] = {}
        # Steps of which half or more is prefills, and how many times as long others of as many tokens take: those
        # need the logits of each token.
        self._prefills: dict[int, _Bin] = {}
        self._others = _Bin()
        self._drafts: dict[int, _Bin] = {}
        # A token that the drafter lacks.
        self._catch_up = _Bin()
        # How many times the averages steps take lately.
        self._pace = 1.0
        # Steps since the workers' drafter was last measured, and those until `take` may have news.
        self._num_without_drafts, self._steps_to_news = 0, _STEPS_BETWEEN_NEWS
        # The seconds of each bin when the core was told last.
        self._told: dict[int, float] = {}
        self._told_drafts: dict[int, float] = {}
        self._told_catch_up = 0.0
        # The scheduler's time for steps without drafts and with them, and what choosing drafts took when told last.
        self._scheduling = {has_drafts: _Bin() for has_drafts in (False, True)}
        self._told_choosing = FIRST_CHOOSING_SECONDS

    def note(self, plan: Plan, seconds: float, drafting: float = 0.0, *, num_drafted: int | None = None) -> None:
        """Takes the time of a step. drafting: the part of it in which the workers' drafter computed. num_drafted: the
        rows for which it proposed something; None: all that the plan names."""
        num_tokens = plan.num_tokens
        if num_tokens < 1 or not 0 <= drafting < seconds:
            return
        bins, at_pace = self._bins(plan), (seconds - drafting) / self._pace
        if plan.has_drafts and bins is self._steps:
            self._compare(num_tokens, at_pace)
        factor = bins.setdefault(_bin_of(num_tokens), _Bin()).note(num_tokens, at_pace)
        self._num_without_drafts += 1
        self._steps_to_news -= 1
        if drafting and plan.wanted_drafts:
            self._note_drafts(plan, drafting / self._pace, num_drafted)
        if self._num_without_drafts and self._num_without_drafts % _STEPS_BETWEEN_FALLS == 0:
            for each in (self._catch_up, *self._drafts.values()):
                each.seconds *= 1 - _FALL
        self._pace *= factor**_PACE_WEIGHT

    def _compare(self, num_tokens: int, seconds: float) -> None:
        """Compares a step with one of prefills, if one is about as long."""
        known = (each for each in self._prefills.values() if each.seconds)
        near = min(known, key=lambda each: abs(each.num_tokens - num_tokens), default=None)
        if near is not None and abs(near.num_tokens - num_tokens) <= _NEARLY_AS_LONG * num_tokens:
            self._others.note(1, seconds / num_tokens * near.num_tokens / near.seconds, of_drafter=True)

    def _all_steps(self) -> dict[int, _Bin]:
        """The bins that count, in order. Where no others were measured, they follow from those of prefills."""
        times = max(1.0, self._others.seconds)
        bins = {
            number: _Bin(each.num_tokens, each.seconds * times, each.weight) for number, each in self._prefills.items()
        }
        bins |= {number: each for number, each in self._steps.items() if each.seconds}
        return {number: each for number, each in sorted(bins.items()) if each.seconds}

    def _note_drafts(self, plan: Plan, seconds: float, num_drafted: int | None) -> None:
        wanted, num_catching_up = plan.wanted_drafts, plan.num_catching_up
        num_drafted = len(wanted) if num_drafted is None else num_drafted
        # The drafter proposes one draft of all rows after the other.
        number, most = _bin_of(len(wanted)), max(count for _, count in wanted)
        each = self._drafts.setdefault(number, _Bin())
        if num_catching_up == 0 and num_drafted:
            each.note(len(wanted), seconds / most, of_drafter=True)
            # For so many rows it may cost far more than was thought: that can't wait.
            if each.seconds and _has_changed(self._told_drafts, {number: each.seconds}):
                self._steps_to_news = 0
            self._num_without_drafts = 0
            return
        # If all rows have drafts, it has caught up in this step.
        has_caught_up = num_drafted >= len(wanted) and (num_catching_up or 0) >= _LEAST_CATCHING_UP
        if num_catching_up and has_caught_up and each.seconds and seconds > most * each.seconds:
            seconds = (seconds - most * each.seconds) / num_catching_up
            self._catch_up.note(num_catching_up, seconds, of_drafter=True)

    def expect(self, plan: Plan) -> float:
        """The seconds that a step should take, by the measured ones with the next fewer and more tokens. 0 if none was
        measured."""
        bins, num_tokens = self._bins(plan), max(1, plan.num_tokens)
        number = _bin_of(num_tokens)
        if (exactly := bins.get(number)) is not None and num_tokens <= _MOST_ALONE and exactly.num_tokens == num_tokens:
            return self._pace * exactly.least
        below = bins.get(max((each for each in bins if each <= number), default=-1))
        above = bins.get(min((each for each in bins if each > number), default=-1))
        if below is None or above is None:
            nearest = above if below is None else below
            if nearest is None:
                return 0.0
            # A token of prefills takes about as long in steps of any size, and a step of decodes at least as others.
            times = num_tokens / nearest.num_tokens if bins is self._prefills else 1.0
            return self._pace * nearest.least * times
        share = (num_tokens - below.num_tokens) / (above.num_tokens - below.num_tokens)
        return self._pace * (below.least + min(max(share, 0.0), 1.0) * (above.least - below.least))

    def _bins(self, plan: Plan) -> dict[int, _Bin]:
        return self._prefills if 2 * plan.num_prefill_tokens >= plan.num_tokens else self._steps

    def note_scheduling(self, seconds: float, *, has_drafts: bool) -> None:
        """Takes the scheduler's time for a step: its plan, and what the core makes of its result."""
        self._scheduling[has_drafts].note(1, seconds / self._pace)

    @property
    def _choosing(self) -> float:
        """The seconds that a step with drafts takes the scheduler more than another. In most of the others, drafters
        rest."""
        without, with_drafts = (self._scheduling[each].seconds for each in (False, True))
        return max(0.0, with_drafts - without) if without and with_drafts else FIRST_CHOOSING_SECONDS

    @property
    def may_have_news(self) -> bool:
        """True if it is time for `take`."""
        return self._steps_to_news <= 0

    def take(self) -> StepCosts | None:
        """The costs, if they have changed by much since the last call that returned some."""
        self._steps_to_news = _STEPS_BETWEEN_NEWS
        bins = self._all_steps()
        steps = _rising(bins)
        drafts = {number: each.seconds for number, each in self._drafts.items() if each.seconds}
        choosing = self._choosing
        catch_up = self._catch_up.seconds
        scalars = ((self._told_choosing, choosing), (self._told_catch_up, catch_up))
        has_changed = _has_changed(self._told, steps) or _has_changed(self._told_drafts, drafts)
        if not steps or not (has_changed or any(abs(new - told) > _LEAST_CHANGE * new for told, new in scalars)):
            return None
        self._told, self._told_drafts, self._told_choosing, self._told_catch_up = steps, drafts, choosing, catch_up
        numbers = sorted(steps)
        num_tokens = [max(1, round(bins[number].num_tokens)) for number in numbers]
        seconds = [steps[number] for number in numbers]
        if num_tokens[0] > 1:
            # Steps of fewer tokens take no less.
            num_tokens, seconds = [1, *num_tokens], [seconds[0], *seconds]
        draft_seconds: tuple[float, ...] = ()
        if drafts:
            rows = sorted(drafts)
            sizes = [self._drafts[number].num_tokens for number in rows]
            measured = np.clip(num_tokens, sizes[0], sizes[-1])
            # For fewer rows than those measured, drafts are taken to cost as much a row, as what seems too dear is not
            # tried. For more they cost something between that and as steps do: SmolLM2's int4 does on two cores.
            as_steps = np.array(seconds) / np.interp(measured, num_tokens, seconds)
            by_rows = np.array(num_tokens) / measured
            scale = np.where(by_rows > 1.0, np.sqrt(by_rows * as_steps), by_rows)
            draft_seconds = tuple((np.interp(measured, sizes, [drafts[number] for number in rows]) * scale).tolist())
        return StepCosts(
            num_tokens=tuple(num_tokens),
            seconds=tuple(seconds),
            draft_seconds=draft_seconds,
            catch_up_seconds=catch_up,
            choosing_seconds=choosing,
        )


def _bin_of(num_tokens: int) -> int:
    if num_tokens <= _MOST_ALONE:
        return num_tokens
    return _MOST_ALONE + math.ceil(_BINS_A_DOUBLING * math.log2(num_tokens / _MOST_ALONE))


def _rising(bins: dict[int, _Bin]) -> dict[int, float]:
    """The seconds of bins, which come in order, as they are most likely if no step takes less than a smaller one: where
    they fall, neighbours share their mean (Ayer and others, Annals of Mathematical Statistics 26, 1955)."""
    # Mean, weight and numbers of runs of bins.
    runs: list[tuple[float, float, list[int]]] = []
    for number, each in bins.items():
        seconds, weight, numbers = each.seconds, each.weight, [number]
        while runs and runs[-1][0] >= seconds:
            earlier, of_earlier, before = runs.pop()
            seconds = (earlier * of_earlier + seconds * weight) / (of_earlier + weight)
            weight, numbers = of_earlier + weight, before + numbers
        runs.append((seconds, weight, numbers))
    return {number: seconds for seconds, _, numbers in runs for number in numbers}


def _has_changed(before: dict[int, float], now: dict[int, float]) -> bool:
    return any(abs(seconds - before.get(number, 0.0)) > _LEAST_CHANGE * seconds for number, seconds in now.items())
