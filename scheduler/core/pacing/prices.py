"""Predicts a step's time as a sum of prices of its parts, learned from earlier steps.

The parts are those of `octavo.plan.costs.fitted` that a scheduler can choose: least squares of relative errors, and no
price is below 0. Here the sums are kept with the prices, and old steps fade. All of it is plain floats in a fixed
order, without numpy: a trace replays to the same budgets on every machine.
"""

import math
from dataclasses import dataclass

# A step counts half after about 70 later ones of its kind: with prefills, or without. So the prices of prefills outlast
# hours in which there are none.
_DECAY = 0.99
# Rounds of coordinate descent for each use. They begin with the last prices, which are nearly right.
_NUM_ROUNDS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """The work of a step."""

    num_prefill_tokens: int = 0
    # (query, key) pairs of the prefills' attention.
    num_pairs: int = 0
    # Tokens that decode, drafts included, and the tokens whose KV they read.
    num_decode_tokens: int = 0
    num_context_tokens: int = 0
    # Embeddings of images that the step encodes.
    num_embeddings: int = 0

    @property
    def terms(self) -> tuple[float, ...]:
        """One number a price. What a step costs whatever it computes comes last: what can be put down to tokens is."""
        return (
            float(self.num_prefill_tokens),
            float(self.num_decode_tokens),
            float(self.num_pairs),
            float(self.num_context_tokens),
            float(self.num_embeddings),
            1.0,
        )


_TOKEN, _DECODE, _PAIR, _CONTEXT, _EMBEDDING, _STEP = range(6)
_NUM_TERMS = 6


def pairs_of(start: int, count: int) -> int:
    """(query, key) pairs of a prefill of `count` tokens from position `start` on."""
    return count * start + count * (count + 1) // 2


class _Sums:
    """Products of the terms of all steps of a kind, each divided by the step's seconds, and sums of these quotients."""

    def __init__(self, indices: tuple[int, ...]) -> None:
        """indices: of the terms that steps of this kind can have."""
        self._indices = indices
        self.products = [0.0] * (_NUM_TERMS * _NUM_TERMS)
        self.quotients = [0.0] * _NUM_TERMS

    def add(self, terms: tuple[float, ...], seconds: float) -> None:
        products, quotients = self.products, self.quotients
        shares = [term / seconds for term in terms]
        for row in self._indices:
            share, first = shares[row], row * _NUM_TERMS
            quotients[row] = _DECAY * quotients[row] + share
            for column in self._indices:
                products[first + column] = _DECAY * products[first + column] + share * shares[column]


class Prices:
    def __init__(self) -> None:
        self._prices = [0.0] * _NUM_TERMS
        # The first is for steps without prefills.
        self._sums = _Sums((_DECODE, _CONTEXT, _STEP)), _Sums(tuple(range(_NUM_TERMS)))
        self._is_outdated = False

    def note(self, work: StepWork, seconds: float) -> None:
        """Takes the time of a step, above 0."""
        self._sums[work.num_prefill_tokens > 0].add(work.terms, seconds)
        self._is_outdated = True

    def seconds(self, work: StepWork) -> float:
        """The predicted time of a step; 0 before one has been measured."""
        return sum(price * term for price, term in zip(self._now(), work.terms, strict=True))

    def prefill_seconds(self, start: int, count: int) -> float:
        """The seconds that a prefill of `count` tokens from position `start` on adds to a step."""
        prices = self._now()
        return prices[_TOKEN] * count + prices[_PAIR] * pairs_of(start, count)

    def num_prefill_tokens(self, seconds: float, start: int, *, most: int) -> int:
        """How many tokens from position `start` on a prefill can compute in so many seconds; at most `most`."""
        if seconds <= 0:
            return 0
        prices = self._now()
        # The positive root of the pairs' quadratic equation, in the form that also holds where their price is 0.
        linear = prices[_TOKEN] + prices[_PAIR] * (start + 0.5)
        divisor = linear + math.sqrt(linear * linear + 2 * prices[_PAIR] * seconds)
        return most if 2 * seconds >= most * divisor else int(2 * seconds / divisor)

    @property
    def draft_seconds(self) -> float:
        """The seconds that a draft adds to a step: at least those of a token of a prefill."""
        prices = self._now()
        return max(prices[_TOKEN], prices[_DECODE])

    @property
    def embedding_seconds(self) -> float:
        """The seconds that an embedding that is encoded adds to a step."""
        return self._now()[_EMBEDDING]

    def _now(self) -> list[float]:
        if self._is_outdated:
            self._fit()
            self._is_outdated = False
        return self._prices

    def _fit(self) -> None:
        """Coordinate descent on the normal equations: each price in turn is set to its best value, or 0."""
        without, with_prefills = self._sums
        products = [a + b for a, b in zip(without.products, with_prefills.products, strict=True)]
        quotients = [a + b for a, b in zip(without.quotients, with_prefills.quotients, strict=True)]
        prices = self._prices
        for _ in range(_NUM_ROUNDS):
            for index in range(_NUM_TERMS):
                row = products[index * _NUM_TERMS : (index + 1) * _NUM_TERMS]
                if row[index] > 0:
                    error = quotients[index] - sum(a * b for a, b in zip(row, prices, strict=True))
                    prices[index] = max(0.0, prices[index] + error / row[index])

    # --- Snapshots

    def save(self) -> list[list[float]]:
        """Returns what `restore` takes, exactly. Leaves the prices up to date, as it does in the restored core."""
        saved = [list(self._now())]
        for sums in self._sums:
            saved += [list(sums.products), list(sums.quotients)]
        return saved

    def restore(self, saved: list[list[float]]) -> None:
        """Takes what `save` returned. Raises ValueError if it is of another shape."""
        lengths = [len(each) for each in saved]
        if lengths != [_NUM_TERMS, *(_NUM_TERMS * _NUM_TERMS, _NUM_TERMS) * 2]:
            raise ValueError(f"prices of steps have lists of {lengths} numbers")
        self._prices = list(saved[0])
        for sums, products, quotients in zip(self._sums, saved[1::2], saved[2::2], strict=True):
            sums.products, sums.quotients = list(products), list(quotients)
