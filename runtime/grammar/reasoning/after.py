"""Free text before a constraint, up to the end of the first occurrence of a text such as </think>.

The free part has no grammar: any token may come but those that end the output, special ones too, because models mark
with them what they think. The automaton of Knuth, Morris and Pratt finds the text in the bytes of the tokens.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Self

import numpy as np

from runtime.grammar.engine import Matcher

if TYPE_CHECKING:
    # The engine above hands its own matchers to these.
    from runtime.grammar.llguidance_matcher import LlguidanceMatcher


class Occurrence:
    """A text that is looked for in tokens. A state is the number of its bytes that have just come."""

    def __init__(self, text: bytes, token_texts: Sequence[bytes], sorted_texts: Sequence[tuple[bytes, int]]) -> None:
        """token_texts: what each token, also a special one, is in the text; nothing for ids without a token.
        sorted_texts: those that are something, each with its token."""
        self.token_texts, self._sorted_texts = token_texts, sorted_texts
        self._text = text
        # For each state, the longest shorter one whose bytes have just come, too.
        self._shorter = [0] * (len(text) + 1)
        length = 0
        for end in range(1, len(text)):
            while length and text[end] != text[length]:
                length = self._shorter[length]
            length += text[end] == text[length]
            self._shorter[end + 1] = length

    def advance(self, state: int, data: bytes) -> tuple[int, bytes | None]:
        """Returns the state after more bytes, and what is behind the text if it has come."""
        for index, byte in enumerate(data):
            while state and byte != self._text[state]:
                state = self._shorter[state]
            state += byte == self._text[state]
            if state == len(self._text):
                return state, data[index + 1 :]
        return state, None

    def ends_within(self, state: int) -> list[tuple[int, bytes]]:
        """Returns the tokens in which the text ends, in this state, before they do: their ids, and what is behind."""
        shorter, rests, candidates = state, {self._text[state:]}, set(self._around)
        while shorter:
            shorter = self._shorter[shorter]
            rests.add(self._text[shorter:])
        texts = self._sorted_texts
        for rest in rests:
            at = bisect_left(texts, (rest, -1))
            while at < len(texts) and texts[at][0].startswith(rest):
                candidates.add(texts[at][1])
                at += 1
        found = ((each, self.advance(state, self.token_texts[each])[1]) for each in sorted(candidates))
        return [(token_id, behind) for token_id, behind in found if behind]

    @cached_property
    def _around(self) -> list[int]:
        """The tokens that have the whole text in them."""
        return [token_id for token_id, text in enumerate(self.token_texts) if self._text in text]


class FreePart:
    """Knowledge of the free part, which the matchers of one constraint share."""

    def __init__(self, occurrence: Occurrence, free_W: np.ndarray, start: "LlguidanceMatcher") -> None:
        """free_W: the mask of the tokens that free text may have. start: the constraint's own matcher, fresh."""
        self.occurrence = occurrence
        self.start = start
        self._free_W = free_W
        self._masks: dict[int, np.ndarray] = {}

    def may_come(self, token_id: int) -> bool:
        return 0 <= token_id < len(self.occurrence.token_texts) and _has(self._free_W, token_id)

    def mask(self, state: int) -> np.ndarray:
        """Returns the mask of a state: a token that ends behind the text must go on as the constraint begins."""
        found = self._masks.get(state)
        if found is None:
            found = self._free_W.copy()
            for token_id, behind in self.occurrence.ends_within(state):
                if not self.start.copy().take_bytes(behind):
                    found.view(np.uint32)[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)
            self._masks[state] = found
        return found


class AfterMatcher(Matcher):
    """Where an output is in its free part, or behind it in the constraint."""

    def __init__(self, part: FreePart) -> None:
        self._part = part
        self._state = 0
        # None in the free part.
        self._inner: LlguidanceMatcher | None = None

    def fill_mask(self, mask_W: np.ndarray) -> bool:
        if self._inner is not None:
            return self._inner.fill_mask(mask_W)
        mask_W[:] = self._part.mask(self._state)
        return False

    def take(self, token_id: int) -> bool:
        if self._inner is not None:
            return self._inner.take(token_id)
        if not self._part.may_come(token_id):
            return False
        state, behind = self._part.occurrence.advance(self._state, self._part.occurrence.token_texts[token_id])
        if behind is not None:
            inner = self._part.start.copy()
            if behind and not inner.take_bytes(behind):
                return False
            self._inner = inner
        self._state = state
        return True

    def forced_tokens(self, most: int) -> list[int]:
        return [] if self._inner is None else self._inner.forced_tokens(most)

    def copy(self) -> Self:
        copied = type(self)(self._part)
        copied._state = self._state
        copied._inner = None if self._inner is None else self._inner.copy()
        return copied

    @property
    def error(self) -> str:
        return "" if self._inner is None else self._inner.error


def _has(mask_W: np.ndarray, token_id: int) -> bool:
    return bool(mask_W.view(np.uint32)[token_id // 32] >> np.uint32(token_id % 32) & np.uint32(1))
