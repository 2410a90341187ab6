"""Finds stop strings in text that arrives in deltas, and holds back what might begin one."""

from array import array
from collections.abc import Sequence

# Texts up to this length are matched character by character, longer ones by str.find. It is four times the longest
# stop string: from there on str.find takes linear time whatever the two look like (CPython's two-way search).
_SHORT_CHARS = 4096


def _failure_table(pattern: str) -> array:
    """Knuth, Morris, Pratt: entry i is the length of the longest proper border of pattern[:i]."""
    table = array("H", bytes(2 * (len(pattern) + 1)))
    border = 0
    for i in range(1, len(pattern)):
        while border and pattern[i] != pattern[border]:
            border = table[border]
        border += pattern[i] == pattern[border]
        table[i + 1] = border
    return table


class StopStrings:
    """A request's stop strings with what is computed from them; all choices share it."""

    __slots__ = ("patterns", "tables")

    def __init__(self, stop: Sequence[str]) -> None:
        # The longest one first.
        self.patterns = tuple(sorted(set(stop), key=len, reverse=True))
        self.tables = tuple(map(_failure_table, self.patterns))


class StopMatcher:
    """One choice's stop strings over its text.

    The match that ends first wins, so the result does not depend on how the text is cut into pieces; of two that end
    together the longer one wins. Each character costs a constant time per stop string, whatever they look like.
    """

    __slots__ = ("_held", "_include", "_states", "_stops", "match_end", "matched")

    def __init__(self, stops: StopStrings, *, include_in_output: bool) -> None:
        self._stops = stops
        # For each pattern the characters of it that the text ends with.
        self._states = [0] * len(stops.patterns)
        self._include = include_in_output
        self._held = ""
        # The stop string found, once there is one, and where it ends in the text pushed last.
        self.matched: str | None = None
        self.match_end = 0

    def push(self, text: str, *, may_stop: bool) -> str:
        """Takes more text; returns what can be shown now. After a match (`matched`) nothing more may be pushed.

        may_stop: a match that this text completes counts (min_tokens is reached), wherever it began.
        """
        assert self.matched is None
        if not self._states:
            return text
        known = self._held + text
        take = self._take_short if len(text) <= _SHORT_CHARS else self._take_long
        for i, pattern in enumerate(self._stops.patterns):
            end = take(i, known, len(self._held), may_stop)
            if end is not None and (self.matched is None or end < self.match_end):
                self.matched, self.match_end = pattern, end
        if self.matched is None:
            return self._show(known, max(self._states))
        shown = known[: len(self._held) + self.match_end]
        self._held = ""
        return shown if self._include else shown[: len(shown) - len(self.matched)]

    def finish(self) -> str:
        """Returns the text held back: the output has ended without a match."""
        return self._show(self._held, 0)

    def _take_short(self, i: int, known: str, num_old: int, may_stop: bool) -> int | None:
        """Advances a pattern's state over known[num_old:]. Returns the end in there of the first match that counts."""
        pattern, table, state = self._stops.patterns[i], self._stops.tables[i], self._states[i]
        position = num_old
        while position < len(known):
            if not state and (position := known.find(pattern[0], position)) < 0:
                break
            char = known[position]
            position += 1
            while state and pattern[state] != char:
                state = table[state]
            state += pattern[state] == char
            if state == len(pattern):
                if may_stop:
                    return position - num_old
                state = table[state]
        self._states[i] = state
        return None

    def _take_long(self, i: int, known: str, num_old: int, may_stop: bool) -> int | None:
        """Does the same, with str.find for the match. What `known` ends with then gives the state."""
        size = len(self._stops.patterns[i])
        if may_stop:
            start = known.find(self._stops.patterns[i], max(num_old - size + 1, 0))
            if start >= 0:
                return start + size - num_old
        self._states[i] = 0
        return self._take_short(i, known, max(len(known) - size + 1, num_old), may_stop=False)

    def _show(self, text: str, num_held: int) -> str:
        cut = len(text) - num_held
        self._held = text[cut:]
        return text[:cut]
