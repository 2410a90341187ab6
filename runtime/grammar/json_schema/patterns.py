"""Regular expressions of JSON Schema: ECMA-262's dialect, matched anywhere in a string.

The library reads Rust's dialect, in which \\s, \\d, a dot and brackets mean something else, and matches a whole string.
So a pattern is parsed here and written anew, anchored at both ends, with each set of characters in full. What a finite
automaton can't do is refused by its name.
"""

from dataclasses import dataclass

from runtime.grammar.engine import MAX_DEPTH, MAX_REPEAT, ConstraintError
from runtime.grammar.json_schema.code_points import (
    ALL,
    DIGITS,
    LINE_ENDS,
    SPACE,
    WORD,
    Ranges,
    has_writable,
    inverse,
    normal,
    written,
)

_SETS: dict[str, Ranges] = {
    "d": DIGITS,
    "D": inverse(DIGITS),
    "w": WORD,
    "W": inverse(WORD),
    "s": SPACE,
    "S": inverse(SPACE),
}
_CONTROLS = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D, "0": 0x00}
_ANYTHING = "(?s:.)*"
_HIGH, _LOW = range(0xD800, 0xDC00), range(0xDC00, 0xE000)


@dataclass(frozen=True, slots=True)
class _Anchor:
    is_start: bool


@dataclass(frozen=True, slots=True)
class _Text:
    """A part without anchors, as it is written."""

    text: str


@dataclass(frozen=True, slots=True)
class _Group:
    """Alternatives. quantifier: how often, such as {2,3}; empty for once."""

    alternatives: "tuple[tuple[_Part, ...], ...]"
    quantifier: str = ""


_Part = _Anchor | _Text | _Group


def anchored_pattern(pattern: str, place: str) -> str:
    """Returns a pattern that matches the strings in which the given one matches, as a whole, in Rust's dialect and in
    ECMA-262's. Raises ConstraintError, with the place."""
    try:
        alternatives = _Parser(pattern).parse()
        return f"^(?:{'|'.join(_open(alternatives, True, True))})$"
    except _Refused as refused:
        raise ConstraintError(f"json_schema: {place}: {refused}") from None


class _Refused(Exception):
    pass


def _open(alternatives: tuple[tuple[_Part, ...], ...], left: bool, right: bool) -> list[str]:
    """Writes alternatives that may stand anywhere: behind anything if `left`, before anything if `right`."""
    found: list[str] = []
    for parts in alternatives:
        is_left, is_right = left, right
        while parts and parts[0] == _Anchor(True):
            parts, is_left = parts[1:], False
        while parts and parts[-1] == _Anchor(False):
            parts, is_right = parts[:-1], False
        if len(parts) == 1 and isinstance(parts[0], _Group) and not parts[0].quantifier:
            found += _open(parts[0].alternatives, is_left, is_right)
        else:
            found.append(f"{_ANYTHING if is_left else ''}{_written(parts)}{_ANYTHING if is_right else ''}")
    return found


def _written(parts: tuple[_Part, ...]) -> str:
    texts: list[str] = []
    for part in parts:
        match part:
            case _Anchor(is_start):
                raise _Refused(f"{'^' if is_start else '$'} is supported only at the ends of an alternative")
            case _Text(text):
                texts.append(text)
            case _Group(alternatives, quantifier):
                texts.append(f"(?:{'|'.join(map(_written, alternatives))}){quantifier}")
    return "".join(texts)


class _Parser:
    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0

    def parse(self) -> tuple[tuple[_Part, ...], ...]:
        found = self._alternatives(0)
        if self._at < len(self._text):
            raise _Refused(f"a ) at character {self._at} closes nothing")
        return found

    def _peek(self, length: int = 1) -> str:
        return self._text[self._at : self._at + length]

    def _take(self, text: str) -> bool:
        if self._text.startswith(text, self._at):
            self._at += len(text)
            return True
        return False

    def _next(self) -> str:
        if self._at == len(self._text):
            raise _Refused("the pattern ends too soon")
        self._at += 1
        return self._text[self._at - 1]

    def _alternatives(self, depth: int) -> tuple[tuple[_Part, ...], ...]:
        if depth > MAX_DEPTH:
            raise _Refused(f"groups are nested more than {MAX_DEPTH} deep")
        found: list[tuple[_Part, ...]] = []
        parts: list[_Part] = []
        while self._at < len(self._text) and self._peek() != ")":
            if self._take("|"):
                found.append(tuple(parts))
                parts = []
            else:
                parts.append(self._part(depth))
        return (*found, tuple(parts))

    def _part(self, depth: int) -> _Part:
        if self._take("^"):
            return _Anchor(True)
        if self._take("$"):
            return _Anchor(False)
        part = self._group(depth) if self._peek() == "(" and self._peek(6) != "(?s:.)" else _Text(self._atom())
        quantifier = self._quantifier()
        if isinstance(part, _Group):
            return _Group(part.alternatives, quantifier)
        return _Text(part.text + quantifier)

    def _group(self, depth: int) -> _Group:
        self._next()
        if self._take("?"):
            if self._take("<") and self._peek() not in ("=", "!"):
                while self._next() != ">":
                    pass
            elif not self._take(":"):
                looks = self._text[self._at - 1] == "<" or self._peek() in ("=", "!")
                raise _Refused("lookaround is not supported" if looks else "flags are not supported")
        found = self._alternatives(depth + 1)
        if not self._take(")"):
            raise _Refused("a ( is not closed")
        return _Group(found)

    def _quantifier(self) -> str:
        found = ""
        if self._peek() in ("*", "+", "?") and self._peek():
            found = self._next()
        elif self._peek() == "{" and (counts := self._counts()) is not None:
            found = counts
        if found:
            # A lazy quantifier matches the same strings.
            self._take("?")
            if self._peek() in ("*", "+", "?") and self._peek():
                raise _Refused("a quantifier follows a quantifier")
        return found

    def _counts(self) -> str | None:
        """Reads {2}, {2,} or {2,3}; any other brace is a character."""
        end = self._text.find("}", self._at)
        inner = self._text[self._at + 1 : end] if end >= 0 else ""
        least, comma, most = inner.partition(",")
        if not (least.isascii() and least.isdigit()) or (most and not (most.isascii() and most.isdigit())):
            return None
        counts = [int(each[:8]) for each in (least, most) if each]
        if max(counts) > MAX_REPEAT:
            raise _Refused(f"{{{inner[:40]}}} repeats more than {MAX_REPEAT} times")
        if counts != sorted(counts):
            raise _Refused(f"the bounds of {{{inner}}} are out of order")
        self._at = end + 1
        return "{" + str(counts[0]) + comma + (str(counts[1]) if most else "") + "}"

    def _atom(self) -> str:
        if self._take("(?s:.)"):
            return written(ALL)
        character = self._next()
        match character:
            case ".":
                ranges = inverse(LINE_ENDS)
            case "[":
                ranges = self._set()
            case "\\":
                ranges = self._escape(within_set=False)
            case "*" | "+" | "?":
                raise _Refused(f"nothing stands before {character}")
            case _:
                ranges = self._one(character)
        if not has_writable(ranges):
            raise _Refused(f"the control character U+{ranges[0][0]:04X} is not supported")
        return written(ranges)

    def _set(self) -> Ranges:
        is_inverse = self._take("^")
        ranges: list[tuple[int, int]] = []
        while not self._take("]"):
            first = self._member()
            if self._peek() == "-" and self._peek(2) != "-]":
                self._next()
                last = self._member()
                if len(first) != 1 or len(last) != 1 or first[0][0] != first[0][1] or last[0][0] != last[0][1]:
                    raise _Refused("a range of characters has a set at one end")
                if first[0][0] > last[0][0]:
                    raise _Refused("a range of characters is out of order")
                ranges.append((first[0][0], last[0][0]))
            else:
                ranges += first
        found = inverse(ranges) if is_inverse else normal(ranges)
        if not found:
            raise _Refused("a set has no characters")
        return found

    def _member(self) -> Ranges:
        character = self._next()
        return self._escape(within_set=True) if character == "\\" else self._one(character)

    def _one(self, character: str) -> Ranges:
        return ((ord(character), ord(character)),)

    def _escape(self, *, within_set: bool) -> Ranges:
        letter = self._next()
        if letter in _SETS:
            return _SETS[letter]
        if letter in _CONTROLS and not (letter == "0" and self._peek().isdigit()):
            return ((_CONTROLS[letter], _CONTROLS[letter]),)
        if letter == "b" and within_set:
            return ((0x08, 0x08),)
        if letter in ("b", "B"):
            raise _Refused(f"\\{letter} (a word's boundary) is not supported")
        if letter in "123456789" or letter == "k":
            raise _Refused("references back to a group are not supported")
        if letter in ("p", "P"):
            raise _Refused(f"\\{letter} (properties of characters) is not supported")
        if letter == "c" and self._peek().isascii() and self._peek().isalpha():
            return self._one(chr(ord(self._next()) % 32))
        if letter == "x":
            return self._one(chr(self._hexadecimal(2)))
        if letter == "u":
            return self._one(chr(self._unicode()))
        if letter.isalnum():
            raise _Refused(f"the escape \\{letter} is not known")
        return self._one(letter)

    def _hexadecimal(self, length: int) -> int:
        digits = self._peek(length)
        self._at += length
        if len(digits) != length or any(digit not in "0123456789abcdefABCDEF" for digit in digits):
            raise _Refused(f"an escape needs {length} hexadecimal digits")
        return int(digits, 16)

    def _unicode(self) -> int:
        if self._peek() == "{":
            end = self._text.find("}", self._at)
            length = end - self._at - 1
            if not 1 <= length <= 8:
                raise _Refused("\\u{ needs up to 6 hexadecimal digits and }")
            self._next()
            code = self._hexadecimal(length)
            self._next()
        else:
            code = self._hexadecimal(4)
            if code in _HIGH and self._take("\\u"):
                low = self._hexadecimal(4)
                if low in _LOW:
                    return 0x10000 + (code - 0xD800 << 10) + (low - 0xDC00)
        if code > 0x10FFFF or code in _HIGH or code in _LOW:
            raise _Refused(f"\\u{code:X} is no character")
        return code
