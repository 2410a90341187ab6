"""Finds where outputs end: at an end token, or when their last tokens repeat."""

from array import array
from collections import Counter
from collections.abc import Iterable

import numpy as np

from scheduler.core.messages import RepetitionRule


class EndTokens:
    """The union of the running sequences' end tokens, as a mask."""

    def __init__(self) -> None:
        self._times: Counter[int] = Counter()
        # Indexed by token id; the last entry stands for all larger ids and stays False.
        self._mask = np.zeros(1, np.bool_)

    def add(self, token_ids: frozenset[int]) -> None:
        """Adds the end tokens of a sequence that begins to run."""
        for token in token_ids:
            self._times[token] += 1
            if token + 2 > len(self._mask):
                self._mask = np.append(self._mask, np.zeros(token + 2 - len(self._mask), np.bool_))
            self._mask[token] = True

    def remove(self, token_ids: frozenset[int]) -> None:
        """Removes the end tokens of a sequence that no longer runs."""
        for token in token_ids:
            self._times[token] -= 1
            if not self._times[token]:
                del self._times[token]
                self._mask[token] = False

    def among(self, token_ids: np.ndarray) -> np.ndarray:
        """Mask of the tokens that end at least one running sequence, not necessarily the one that got the token."""
        return self._mask.take(token_ids, mode="clip")

    def check_integrity(self, running: Iterable[frozenset[int]]) -> None:
        times = Counter(token for token_ids in running for token in token_ids)
        assert self._times == times, "end tokens are counted wrongly"
        assert set(np.flatnonzero(self._mask).tolist()) == set(times)


class RepetitionWatch:
    """Watches one output for repetitions: `repetition_detection`, defined as in vLLM.

    An output repeats itself if its last p * min_count tokens are one pattern of p tokens, min_count times, for a p from
    min_pattern_size to max_pattern_size. For each p it is enough to know how many of the last tokens equal the token p
    places before them: p * (min_count - 1) are needed. A token costs one comparison a p.
    """

    __slots__ = ("_is_repeating", "_lengths", "_needed", "_num_seen", "_runs")

    def __init__(self, rule: RepetitionRule) -> None:
        self._lengths = np.arange(rule.min_pattern_size, rule.max_pattern_size + 1)
        self._needed = self._lengths * (rule.min_count - 1)
        # For each length, how many of the last tokens equal the one so many places before; at least up to `_needed`.
        self._runs = np.zeros(len(self._lengths), np.int64)
        self._num_seen = 0
        self._is_repeating = False

    def is_repeating(self, output: "array[int]") -> bool:
        """Returns True if the output ends with a repeated pattern. output: int32; grows between two calls."""
        if len(output) == self._num_seen + 1:
            self._take_last(output)
        elif len(output) != self._num_seen:
            self._recount(output)
        self._num_seen = len(output)
        return self._is_repeating

    def _take_last(self, output: "array[int]") -> None:
        last, shortest = len(output) - 1, int(self._lengths[0])
        count = min(last - shortest + 1, len(self._lengths))
        self._is_repeating = False
        if count > 0:
            before = np.frombuffer(output, np.int32)[last - shortest - count + 1 : last - shortest + 1][::-1]
            runs = self._runs[:count]
            runs += 1
            runs *= before == output[last]
            self._is_repeating = bool((runs >= self._needed[:count]).any())

    def _recount(self, output: "array[int]") -> None:
        tokens = np.frombuffer(output, np.int32)
        end = len(tokens)
        self._runs[:] = 0
        for i, (length, needed) in enumerate(zip(self._lengths.tolist(), self._needed.tolist(), strict=True)):
            window = min(needed, end - length)
            if window <= 0:
                break
            differ = np.flatnonzero(tokens[end - window :] != tokens[end - window - length : end - length])
            self._runs[i] = window - 1 - int(differ[-1]) if len(differ) else window
        self._is_repeating = bool((self._runs >= self._needed).any())
