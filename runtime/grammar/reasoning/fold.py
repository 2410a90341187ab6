"""Where an output's reasoning begins and ends, as a fold over its tokens.

Routers count tokens of reasoning with it, workers those of a budget.
"""

import copy
from enum import Enum, auto
from typing import Self

from protos.inference_pb2 import ReasoningMarks

_SPACES = b" \t\n\r"


class _Phase(Enum):
    # Nothing has come but whitespace, and perhaps the beginning of a mark.
    START = auto()
    REASONING = auto()
    # Reasoning may begin again, behind any text.
    BETWEEN = auto()
    # None comes any more.
    OVER = auto()


class Reasoning:
    """The reasoning in the tokens so far. Marks are found in the bytes of the tokens, however those are cut."""

    def __init__(self, marks: ReasoningMarks) -> None:
        self._begins = [text.encode() for text in marks.begins]
        self._ends = [text.encode() for text in marks.ends]
        self._may_recur = marks.may_recur
        # What has no begin mark is reasoning.
        self._starts_open = marks.is_open
        self._phase = _Phase.BETWEEN if marks.may_recur and not marks.is_open else _Phase.START
        # Tokens of reasoning, those of a mark that is not complete among them.
        self.num_tokens = 0
        # The bytes in which the next mark may have begun, and where tokens of reasoning begin in them.
        self._tail = b""
        self._starts: list[int] = []

    @property
    def is_open(self) -> bool:
        """True if the next token is reasoning."""
        return self._phase is _Phase.REASONING or (self._phase is _Phase.START and self._starts_open)

    @property
    def is_over(self) -> bool:
        """True if no reasoning comes any more."""
        return self._phase is _Phase.OVER

    def take(self, data: bytes) -> None:
        """Takes the bytes of the next token."""
        if self.is_over:
            return
        if self.is_open:
            self.num_tokens += 1
            self._starts.append(len(self._tail))
        self._tail += data
        # Behind one mark in a token may be another one.
        while self._read():
            pass

    def copy(self) -> Self:
        copied = copy.copy(self)
        copied._starts = self._starts.copy()
        return copied

    # --- Reads the tail. Returns True if another phase has begun.

    def _read(self) -> bool:
        match self._phase:
            case _Phase.START:
                return self._read_start()
            case _Phase.REASONING:
                return self._read_reasoning()
            case _Phase.BETWEEN:
                return self._read_between()
            case _Phase.OVER:
                return False

    def _read_start(self) -> bool:
        text = self._tail.lstrip(_SPACES)
        for begin in self._begins:
            if text.startswith(begin):
                self._begin(text[len(begin) :])
                return True
        if any(begin.startswith(text) for begin in self._begins):
            return False
        self._phase = _Phase.REASONING if self._starts_open else _Phase.OVER
        return True

    def _read_reasoning(self) -> bool:
        at, end = _first(self._ends, self._tail)
        if end is None:
            self._keep(self._ends)
            return False
        self.num_tokens -= sum(start >= at for start in self._starts)
        self._starts = []
        self._tail = self._tail[at + len(end) :]
        self._phase = _Phase.BETWEEN if self._may_recur else _Phase.OVER
        return True

    def _read_between(self) -> bool:
        at, begin = _first(self._begins, self._tail)
        if begin is None:
            self._keep(self._begins)
            return False
        self._begin(self._tail[at + len(begin) :])
        return True

    def _begin(self, behind: bytes) -> None:
        if self._phase is _Phase.START:
            # A mark of its own behind the prompt's.
            self.num_tokens, self._starts = 0, []
        self._phase, self._tail = _Phase.REASONING, behind

    def _keep(self, marks: list[bytes]) -> None:
        """Drops what no mark can have begun in."""
        dropped = max(0, len(self._tail) - max(map(len, marks), default=1) + 1)
        self._tail = self._tail[dropped:]
        self._starts = [start - dropped for start in self._starts if start >= dropped]


def _first(marks: list[bytes], data: bytes) -> tuple[int, bytes | None]:
    """Returns the mark that stands first, and where; None: there is none."""
    found = [(at, mark) for mark in marks if (at := data.find(mark)) >= 0]
    return min(found, key=lambda each: each[0]) if found else (0, None)
