"""Finds stop strings in text that arrives in deltas, and holds back what might begin one."""

from collections.abc import Sequence


def _failure_table(pattern: str) -> list[int]:
    """Knuth, Morris, Pratt: entry i is the length of the longest proper border of pattern[:i]."""
    table = [0] * (len(pattern) + 1)
    border = 0
    for i in range(1, len(pattern)):
        while border and pattern[i] != pattern[border]:
            border = table[border]
        border += pattern[i] == pattern[border]
        table[i + 1] = border
    return table


class StopMatcher:
    """One choice's stop strings over its text.

    The match that ends first wins, so the result does not depend on how the text is cut into pieces; of two that end
    together the longer one wins. Each character costs a constant time per stop string, whatever they look like.
    """

    __slots__ = ("_held", "_include", "_patterns", "_states", "_tables", "matched")

    def __init__(self, stop: Sequence[str], *, include_in_output: bool) -> None:
        self._patterns = sorted(set(stop), key=len, reverse=True)
        self._tables = [_failure_table(pattern) for pattern in self._patterns]
        self._states = [0] * len(self._patterns)
        self._include = include_in_output
        self._held = ""
        # The stop string found, once there is one.
        self.matched: str | None = None

    def push(self, text: str, *, may_stop: bool) -> str:
        """Takes more text; returns what can be shown now. After a match (`matched`) nothing more may be pushed.

        may_stop: whether a match that this text completes counts (min_tokens is reached), wherever it began.
        """
        assert self.matched is None
        if not self._patterns:
            return text
        for position, char in enumerate(text):
            for i, pattern in enumerate(self._patterns):
                self._states[i] = self._advance(i, char)
                if self._states[i] < len(pattern):
                    continue
                if may_stop:
                    self.matched = pattern
                    shown = self._held + text[: position + 1]
                    self._held = ""
                    return shown if self._include else shown[: len(shown) - len(pattern)]
                self._states[i] = self._tables[i][len(pattern)]
        return self._show(self._held + text, max(self._states))

    def finish(self) -> str:
        """The output has ended without a match: what was held back is text after all."""
        return self._show(self._held, 0)

    def _advance(self, i: int, char: str) -> int:
        pattern, state = self._patterns[i], self._states[i]
        while state and pattern[state] != char:
            state = self._tables[i][state]
        return state + (pattern[state] == char)

    def _show(self, text: str, num_held: int) -> str:
        cut = len(text) - num_held
        self._held = text[cut:]
        return text[:cut]
