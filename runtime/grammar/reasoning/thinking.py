"""A bound on the reasoning of an output: once its tokens are spent, those of the end are the only ones that may come.

What comes before and behind them is free, or follows the constraint of the output.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from runtime.grammar.engine import Matcher, ThinkingBudget
from runtime.grammar.reasoning.fold import Reasoning

if TYPE_CHECKING:
    import numpy as np


class ThinkingMatcher(Matcher):
    """Where an output is in its reasoning, and in its constraint if it has one."""

    def __init__(self, budget: ThinkingBudget, token_texts: Sequence[bytes], inner: Matcher | None) -> None:
        """token_texts: what each token is in a text that shows special tokens. inner: the constraint's, fresh."""
        self._budget, self._token_texts, self._inner = budget, token_texts, inner
        self._reasoning = Reasoning(budget.marks)
        self._end = list(budget.marks.end_token_ids)
        # Tokens of the end that have come; None: the budget is not spent, or the end has come.
        self._num_taken: int | None = None
        self._enforce_if_spent()

    @property
    def is_free(self) -> bool:
        return self._num_taken is None and (self._inner is None or self._inner.is_free)

    def fill_mask(self, mask_W: "np.ndarray") -> bool:
        is_narrow = False
        if self._inner is not None:
            is_narrow = self._inner.fill_mask(mask_W)
        else:
            mask_W[:] = -1
        if self._num_taken is not None:
            word, bit = divmod(self._end[self._num_taken], 32)
            # A mask is int32: bit 31 is the sign.
            kept = int(mask_W[word]) & 1 << bit
            mask_W[:] = 0
            mask_W[word] = kept - (kept >> 31 << 32)
        return is_narrow or self._num_taken is not None

    def take(self, token_id: int) -> bool:
        if not 0 <= token_id < len(self._token_texts):
            return False
        if self._num_taken is not None and token_id != self._end[self._num_taken]:
            return False
        if self._inner is not None and not self._inner.take(token_id):
            return False
        self._reasoning.take(self._token_texts[token_id])
        if self._num_taken is not None:
            self._num_taken += 1
            if self._num_taken == len(self._end):
                self._num_taken = None
        self._enforce_if_spent()
        return True

    def forced_tokens(self, most: int) -> list[int]:
        if self._num_taken is not None:
            return self._end[self._num_taken :][:most]
        return [] if self._inner is None else self._inner.forced_tokens(most)

    def copy(self) -> Self:
        copied = type(self)(self._budget, self._token_texts, None if self._inner is None else self._inner.copy())
        copied._reasoning, copied._num_taken = self._reasoning.copy(), self._num_taken
        return copied

    @property
    def error(self) -> str:
        return "" if self._inner is None else self._inner.error

    def _enforce_if_spent(self) -> None:
        is_spent = self._reasoning.num_tokens >= self._budget.num_tokens
        if self._num_taken is None and self._reasoning.is_open and is_spent:
            self._num_taken = 0
