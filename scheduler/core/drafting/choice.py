"""Chooses the number of drafts of each row in a step: those with the most expected tokens a second.

If the drafts of a row are right with probability p each, the i-th one adds p**i to the expected tokens of the step. Of
all rows' drafts the likeliest are taken first, until another one takes more of the step's time than it is worth: what
the best step without prefills makes of that time (Dinkelbach, Management Science 13, 1967).
"""

import functools

import numpy as np

from scheduler.core.messages import FIRST_CHOOSING_SECONDS, StepCosts

# A proposal counts half after about 22 later ones of its row, and after about 700 of its kind.
_ROW_DECAY, _KIND_DECAY = 0.97, 0.999
# The rate of a kind counts in a row's rate as so many proposals.
_WEIGHT_OF_KIND = 4.0
# A kind begins as if it had made so many proposals, and this share of them had been right.
_FIRST_TRIES, _FIRST_RATE = 8.0, 0.4
# No draft is certain: a text that repeats itself may end at any token.
MOST_RATE = 0.98


class Rates:
    """How often drafts turn out right: by row, lately, and by drafter and length of the context over all rows.

    Every token is compared with what was proposed for it, planned as a draft or not. Arrays have one entry a drafter
    (D), a row (R) or a level (N), the index of a context's order.
    """

    def __init__(self, num_drafters: int, num_rows: int, num_levels: int) -> None:
        self._hits_DR = np.zeros((num_drafters, num_rows))
        self._tries_DR = np.zeros((num_drafters, num_rows))
        self._hits_DN = np.full((num_drafters, num_levels), _FIRST_RATE * _FIRST_TRIES)
        self._tries_DN = np.full((num_drafters, num_levels), _FIRST_TRIES)
        self._powers = _ROW_DECAY ** np.arange(256)

    def begin(self, row: int) -> None:
        """Forgets what was in a row."""
        self._hits_DR[:, row] = self._tries_DR[:, row] = 0.0

    def forget_rows(self) -> None:
        self._hits_DR[:] = self._tries_DR[:] = 0.0

    def note(
        self, drafter: int, rows_L: np.ndarray, levels_L: np.ndarray, hits_L: np.ndarray, tries_L: np.ndarray
    ) -> None:
        """Takes the proposals that were compared with tokens since, and how many of them were right; of a row that has
        none, both are 0."""
        hits_R, tries_R, decay_L = self._hits_DR[drafter], self._tries_DR[drafter], self._powers[tries_L]
        hits_R[rows_L] = hits_R[rows_L] * decay_L + hits_L
        tries_R[rows_L] = tries_R[rows_L] * decay_L + tries_L
        hits_N, tries_N = self._hits_DN[drafter], self._tries_DN[drafter]
        new_tries_N = np.bincount(levels_L, tries_L, len(tries_N))
        decay_N = _KIND_DECAY**new_tries_N
        hits_N *= decay_N
        tries_N *= decay_N
        hits_N += np.bincount(levels_L, hits_L, len(hits_N))
        tries_N += new_tries_N

    def of(self, drafter: int, rows_L: np.ndarray, levels_L: np.ndarray) -> np.ndarray:
        """float64 [L]: the probability that a row's next proposal is right, if those before it are."""
        kind_N = self._hits_DN[drafter] * (_WEIGHT_OF_KIND / self._tries_DN[drafter])
        rates_L = self._hits_DR[drafter][rows_L] + kind_N[levels_L]
        rates_L /= self._tries_DR[drafter][rows_L] + _WEIGHT_OF_KIND
        return np.minimum(rates_L, MOST_RATE)

    def save(self) -> tuple[list[list[float]], list[list[float]]]:
        """Returns the hits and the tries of each kind, for `restore`."""
        return self._hits_DN.tolist(), self._tries_DN.tolist()

    def restore(self, hits: list[list[float]], tries: list[list[float]]) -> None:
        self._hits_DN[:], self._tries_DN[:] = hits, tries


# Counts halve after about 140 later drafts. Both begin at this many.
_DECAY, _FIRST_DRAFTS = 0.995, 16.0


class DraftTrust:
    """Trust in the estimates of drafts: accepted drafts divided by expected ones, lately."""

    def __init__(self) -> None:
        self._expected = self._accepted = _FIRST_DRAFTS

    @property
    def trust(self) -> float:
        """Accepted drafts divided by expected ones, at most 1. Estimates are too high on average, because the drafts
        with the highest estimates are chosen."""
        return self._accepted / self._expected

    def note_verified(self, expected: float, num_accepted: int) -> None:
        """Records a step's drafts. expected: the sum of their estimated probabilities."""
        decay = _DECAY ** max(expected, num_accepted)
        self._expected = self._expected * decay + expected
        # Drafts that did better than estimated don't outweigh later ones that do worse.
        self._accepted = min(self._accepted * decay + num_accepted, self._expected)

    def save(self) -> tuple[float, float]:
        """Returns what `restore` takes."""
        return self._expected, self._accepted

    def restore(self, expected: float, accepted: float) -> None:
        """Takes what `save` returned."""
        self._expected, self._accepted = expected, accepted


# The longest pause, in steps: a change is noticed that many steps late at most, and drafting that does not pay costs a
# seventh of its full cost.
_LONGEST_PAUSE = 6


class DraftingPause:
    """Pauses of drafting: steps without proposals, after a step whose drafts were not used."""

    def __init__(self) -> None:
        # Steps of the latest pause, and those that are left of it.
        self.length = self._num_left = 0

    @property
    def is_on(self) -> bool:
        return self._num_left > 0

    def covers(self) -> bool:
        """Counts a step. Returns True if it is part of a pause."""
        if not self._num_left:
            return False
        self._num_left -= 1
        return True

    def note(self, *, in_vain: bool) -> None:
        """Records a step outside of pauses. in_vain: no draft was used, so a pause begins."""
        self.length = self._num_left = min(2 * self.length + 1, _LONGEST_PAUSE) if in_vain else 0

    def end(self) -> None:
        self.length = self._num_left = 0


# Before anything is measured, each token after the first adds this much of the first one's time.
_FIRST_SHARE = 0.1
# Drafts must gain at least this much over none: estimates err, most of all for the drafts that look best. With 1.03,
# SmolLM2 lost up to 4% at 16 streams on a Zen 4. Those of the workers' drafter are equally deep for all rows.
_LEAST_GAIN, LEAST_GAIN_OF_WORKERS = 1.06, 1.03
# Tokens of a step that hardly costs more than the sum of its tokens.
_LONG_STEP = 512
_MOST_KNOWN = 1024


class CostTable:
    """The seconds of a step by its number of tokens: linear between the measured numbers, and past the last as steep as
    from its half on, since neighbours differ by less than they err."""

    def __init__(self) -> None:
        self.costs: StepCosts | None = None
        self._seconds = np.zeros(0)
        # By rows and tokens of a step.
        self._could_pay: dict[tuple[int, int], bool] = {}

    def seconds(self, first: int, count: int) -> np.ndarray:
        """float64 [count]: seconds of steps with `first` tokens, first + 1, and so on."""
        return self._table(first + count)[first : first + count]

    @property
    def choosing_seconds(self) -> float:
        """Seconds in which the scheduler chooses the drafts of a step."""
        return FIRST_CHOOSING_SECONDS if self.costs is None else self.costs.choosing_seconds

    def draft_seconds(self, num_rows: int) -> float:
        """Seconds of one more draft of the workers' drafter for so many rows."""
        costs = self.costs
        if costs is None or not costs.draft_seconds:
            # As long as nothing is known, an eighth of a step.
            return float(self.seconds(max(1, num_rows), 1)[0]) / 8
        return float(np.interp(num_rows, costs.num_tokens[: len(costs.draft_seconds)], costs.draft_seconds))

    def catch_up_seconds(self) -> float:
        """Seconds in which the workers' drafter computes one more token of a text that it lacks. As long as that is not
        measured, a token costs it as much less than the model as in a draft."""
        if self.costs is not None and self.costs.catch_up_seconds:
            return self.costs.catch_up_seconds
        first, *_, last = self._table(_LONG_STEP + 1)[1 : _LONG_STEP + 1]
        return float(last - first) / (_LONG_STEP - 1) * self.draft_seconds(1) / float(first)

    def could_pay(self, num_rows: int, num_tokens: int, most: int, *, by_workers: bool = False) -> bool:
        """True if drafts would pay in a step of so many rows and tokens, if nearly all were right. most: upper bound of
        a row's drafts. by_workers: only the workers draft, which takes them time."""
        known = self._could_pay.get((num_rows, num_tokens))
        if known is None:
            values_K = MOST_RATE ** np.arange(1, most + 1)
            if by_workers:
                # As few rows as one may have drafts.
                known = any(choose_depth(number * values_K, num_rows, number, self)[0] for number in {1, num_rows})
            else:
                known = _best_count(np.repeat(values_K, num_rows), num_rows, num_tokens, self) > 0
            if len(self._could_pay) >= _MOST_KNOWN:
                self._could_pay.clear()
            self._could_pay[num_rows, num_tokens] = known
        return known

    def set(self, costs: StepCosts | None) -> None:
        self.costs = costs
        self._seconds = np.zeros(0)
        self._could_pay.clear()

    def _table(self, size: int) -> np.ndarray:
        if len(self._seconds) < size:
            numbers = np.arange(max(size, 2 * len(self._seconds), 256), dtype=np.float64)
            costs = self.costs
            if costs is None:
                self._seconds = 1.0 + _FIRST_SHARE * (numbers - 1.0)
            else:
                x, y = np.array(costs.num_tokens, np.float64), np.array(costs.seconds, np.float64)
                self._seconds = np.interp(numbers, x, y)
                half = max(0, int(x.searchsorted(x[-1] / 2, side="right")) - 1)
                slope = (y[-1] - y[half]) / (x[-1] - x[half]) if len(x) > 1 else _FIRST_SHARE * y[-1] / x[-1]
                self._seconds += np.maximum(numbers - x[-1], 0.0) * slope
            # The more tokens the longer, whatever was measured.
            np.maximum.accumulate(self._seconds, out=self._seconds)
        return self._seconds


def choose_counts(
    rates_L: np.ndarray,
    most_L: np.ndarray,
    *,
    num_rows: int,
    num_tokens: int,
    budget: int,
    costs: CostTable,
    trust: float = 1.0,
) -> np.ndarray:
    """int64 [L]: the number of drafts of each row.

    rates_L: the probability that a draft of a row is right. most_L: upper bounds. num_rows, num_tokens: rows that
    sample in the step, and tokens that it computes without drafts. budget: tokens that it has left. trust: the share of
    the expected drafts that come true.
    """
    most = int(most_L.max(initial=0))
    if not most or budget < 1:
        return np.zeros(len(rates_L), np.int64)
    # The value of each draft; those of one row fall. Rows before others where they are equal.
    values_KL = rates_L[None].repeat(most, axis=0).cumprod(axis=0)
    values_KL *= (np.arange(most)[:, None] < most_L) * _order_factors(len(rates_L))
    sorted_values = values_KL.flatten()
    sorted_values.sort()
    sorted_values = sorted_values[::-1][:budget]
    best = _best_count(trust * sorted_values, num_rows, num_tokens, costs)
    if not best:
        return np.zeros(len(rates_L), np.int64)
    return (values_KL >= sorted_values[best - 1]).sum(axis=0)


@functools.lru_cache(maxsize=64)
def _order_factors(num_rows: int) -> np.ndarray:
    """float64 [num_rows]: nearly 1 each, and falling."""
    return 1.0 - 1e-9 * np.arange(num_rows)


def _best_count(values: np.ndarray, num_rows: int, num_tokens: int, costs: CostTable) -> int:
    """How many drafts of these values, which fall, a step should have. num_rows, num_tokens: see `choose_counts`."""
    tokens = values.cumsum()
    tokens += num_rows
    choosing = costs.choosing_seconds
    # Prefills in the step take their time with drafts or without: a second is worth what steps without them make of it.
    seconds = costs.seconds(num_rows, len(tokens) + 1)
    worth = max(num_rows / float(seconds[0]), float((tokens / (seconds[1:] + choosing)).max()))
    if num_tokens != num_rows:
        seconds = costs.seconds(num_tokens, len(tokens) + 1)
    tokens -= worth * seconds[1:]
    best = int(tokens.argmax())
    gained = float(tokens[best]) - num_rows - worth * (choosing - float(seconds[0]))
    return best + 1 if gained >= (_LEAST_GAIN - 1) * num_rows else 0


def choose_depth(values_K: np.ndarray, num_rows: int, num_drafting: int, costs: CostTable) -> tuple[int, float]:
    """The number of drafts that the workers' drafter should make for each of num_drafting of num_rows rows, and the
    seconds that each of these rows then saves a token, beyond what may be an error of the estimates.

    values_K: what the i-th draft of all these rows adds to the expected tokens of a step.
    """
    depths = np.arange(len(values_K) + 1)
    tokens = num_rows + np.append(0.0, values_K.cumsum())
    seconds = costs.seconds(num_rows, len(values_K) * num_drafting + 1)[depths * num_drafting]
    seconds = seconds + depths * costs.draft_seconds(num_drafting)
    seconds[1:] += costs.choosing_seconds
    gains = tokens / seconds
    best = int(gains.argmax())
    if not best or gains[best] < LEAST_GAIN_OF_WORKERS * gains[0]:
        return 0, 0.0
    # In the time of a step without drafts, all rows get a token.
    return best, float(1 / gains[0] - LEAST_GAIN_OF_WORKERS / gains[best]) * num_rows / num_drafting
