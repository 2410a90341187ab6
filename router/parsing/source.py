"""The text that a parser reads; a parser waits for more where the text so far is ambiguous.

A parser is a generator that reads a Source with the methods below and yields where it waits. What it has read, and what
it has given out, is then a function of the text so far, however that came in pieces. No character is read twice, so a
parser's cost is linear in the text.
"""

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
# A parser, or a part of one: it is resumed when text has come or the text has ended.
Reading = Generator[None, None, T]

SPACES = re.compile(r"[ \t\r\n]+")


class Malformed(Exception):
    """Declares that the text held back is not a call: it stays text."""


class Source:
    __slots__ = ("_held", "ended", "position", "text")

    def __init__(self) -> None:
        # What has come and is not behind the parser; it is short, for parsers hold what they read elsewhere.
        self.text = ""
        self.position = 0
        # True once no more comes.
        self.ended = False
        self._held: list[str] | None = None

    def add(self, piece: str) -> None:
        self.text = self.text[self.position :] + piece
        self.position = 0

    # --- text that becomes content if it turns out to be no call

    def hold(self) -> None:
        """Keeps what is taken from here on, until `forget` or `release`."""
        self._held = []

    def forget(self) -> None:
        """Declares that the text held back is part of a call."""
        self._held = None

    def release(self) -> str:
        """Returns what was held."""
        held, self._held = self._held, None
        return "".join(held or ())

    # --- reading

    def take(self, count: int) -> str:
        """Takes characters that are there."""
        taken = self.text[self.position : self.position + count]
        self.position += count
        if self._held is not None:
            self._held.append(taken)
        return taken

    def peek(self) -> Reading[str]:
        """Returns the next character without taking it; empty at the end."""
        while self.position == len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.position]

    def run(self, pattern: re.Pattern[str], most: int | None = None) -> Reading[str]:
        """Takes all characters that come next and match. pattern: one or more characters of a class.

        Raises Malformed if there are more than `most`.
        """
        parts: list[str] = []
        size = 0
        while (yield from self.peek()) and (match := pattern.match(self.text, self.position)):
            size += match.end() - match.start()
            if most is not None and size > most:
                raise Malformed
            parts.append(self.take(match.end() - match.start()))
        return "".join(parts)

    def spaces(self) -> Reading[None]:
        yield from self.run(SPACES)

    def one_of(self, texts: Sequence[str]) -> Reading[str]:
        """Takes and returns the one of the texts that comes next; empty if none does. None may begin another."""
        while True:
            rest = self.text[self.position : self.position + max(map(len, texts))]
            for text in texts:
                if rest.startswith(text):
                    return self.take(len(text))
            if self.ended or not any(text.startswith(rest) for text in texts):
                return ""
            yield

    def expect(self, text: str) -> Reading[None]:
        """Takes the text. Raises Malformed if it does not come next; what is there is not taken then."""
        if not (yield from self.one_of((text,))):
            raise Malformed

    def until(self, marks: "Marks", emit: Callable[[str], None]) -> Reading[str]:
        """Takes the text before the first of the marks and gives it out as it becomes certain. Returns the mark, which
        is not taken; empty at the end of the text."""
        while True:
            start = self.position
            found = marks.search(self.text, start)
            if found is not None:
                if found.start() > start:
                    emit(self.take(found.start() - start))
                return found.group()
            certain = len(self.text) if self.ended else marks.certain_end(self.text, start)
            if certain > start:
                emit(self.take(certain - start))
            if self.ended:
                return ""
            yield

    def rest(self, emit: Callable[[str], None]) -> Reading[None]:
        """Takes all text that comes."""
        while (yield from self.peek()):
            emit(self.take(len(self.text) - self.position))


class Marks:
    """Texts to look for. None begins another one."""

    __slots__ = ("_longest", "search", "texts")

    def __init__(self, *texts: str) -> None:
        assert not any(a != b and a.startswith(b) for a in texts for b in texts)
        self.texts = texts
        self.search = re.compile("|".join(map(re.escape, texts))).search
        self._longest = max(map(len, texts))

    def certain_end(self, text: str, start: int) -> int:
        """Returns where the part of text[start:] ends in which no mark begins. The text has no whole mark there."""
        first = max(start, len(text) - self._longest + 1)
        end = len(text)
        for mark in self.texts:
            position = text.find(mark[0], first, end)
            while position >= 0:
                if mark.startswith(text[position:]):
                    end = position
                    break
                position = text.find(mark[0], position + 1, end)
        return end
