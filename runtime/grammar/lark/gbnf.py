"""Grammars that clients write: in Lark's syntax, or as GBNF (llama.cpp's EBNF), converted to it.

GBNF has no terminals: a rule matches characters. The library matches terminals, as long as they can be, and rules over
them. So what needs no recursion becomes one terminal, and neighbours are joined: then both mean the same. Where a
terminal meets a recursive rule, it is as long as it can be.

Format: grammars/README.md of llama.cpp. The library's own converter loses zeros of \\u escapes and reads && in brackets
as an operator.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from runtime.grammar.engine import MAX_DEPTH, MAX_REPEAT, ConstraintError
from runtime.grammar.json_schema.code_points import ALL, inverse, normal, written
from runtime.grammar.json_text import check_size
from runtime.grammar.lark.text import check_lark, quoted

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_SPACE = re.compile(r"(?:[ \t]|#[^\n]*)+")
_SPACE_AND_LINES = re.compile(r"(?:\s|#[^\n]*)+")
_COUNT = re.compile(r"\{\s*(\d*)\s*(,?)\s*(\d*)\s*\}")
_RULE = re.compile(r"\s*([A-Za-z0-9_-]+)\s*::=")
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t"}
_HEX = {"x": 2, "u": 4, "U": 8}


def is_gbnf(grammar: str) -> bool:
    """Tells GBNF from Lark by its ::= behind a rule's name."""
    return re.search(r"^\s*[A-Za-z0-9_-]+\s*::=", grammar, re.MULTILINE) is not None


@dataclass(frozen=True, slots=True)
class _Terminal:
    """Lark for characters."""

    text: str


@dataclass(frozen=True, slots=True)
class _Name:
    name: str


@dataclass(frozen=True, slots=True)
class _Choice:
    """Alternatives, each a sequence. quantifier: as Lark writes it."""

    options: "tuple[tuple[_Part, ...], ...]"
    quantifier: str = ""


_Part = _Terminal | _Name | _Choice


def lark_of_gbnf(grammar: str) -> str:
    """Returns the grammar in Lark's syntax. Raises ConstraintError, with the line."""
    rules = _Parser(grammar).rules()
    if "root" not in rules:
        raise ConstraintError("grammar has no rule named root")
    return _Writer(rules).lark()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def rules(self) -> dict[str, _Choice]:
        found: dict[str, _Choice] = {}
        self._skip(_SPACE_AND_LINES)
        while self._at < len(self._text):
            head = _RULE.match(self._text, self._at)
            if head is None:
                raise self._wrong("a rule must begin with NAME ::=")
            if head[1] in found:
                raise self._wrong(f"the rule {head[1]!r} is there twice")
            self._at = head.end()
            self._skip(_SPACE_AND_LINES)
            found[head[1]] = _Choice(self._options(0))
            self._skip(_SPACE_AND_LINES)
        return found

    def _wrong(self, what: str) -> ConstraintError:
        line = self._text.count("\n", 0, self._at) + 1
        return ConstraintError(f"grammar, line {line}: {what} (near {self._text[self._at : self._at + 20]!r})")

    def _skip(self, space: re.Pattern[str]) -> None:
        found = space.match(self._text, self._at)
        if found:
            self._at = found.end()

    def _options(self, depth: int) -> tuple[tuple[_Part, ...], ...]:
        if depth > MAX_DEPTH:
            raise self._wrong(f"groups are nested more than {MAX_DEPTH} deep")
        found = [self._sequence(depth)]
        while True:
            # An alternative may begin on a new line.
            at = self._at
            self._skip(_SPACE_AND_LINES)
            if not self._text.startswith("|", self._at):
                self._at = at
                return tuple(found)
            self._at += 1
            self._skip(_SPACE_AND_LINES)
            found.append(self._sequence(depth))

    def _sequence(self, depth: int) -> tuple[_Part, ...]:
        found: list[_Part] = []
        while True:
            self._skip(_SPACE_AND_LINES if depth else _SPACE)
            character = self._text[self._at : self._at + 1]
            if character in ("", "\n", "\r", "|", ")"):
                return tuple(found)
            part = self._part(character, depth)
            self._skip(_SPACE_AND_LINES if depth else _SPACE)
            quantifier = self._quantifier()
            found.append(_Choice(((part,),), quantifier) if quantifier else part)

    def _part(self, character: str, depth: int) -> _Part:
        match character:
            case '"' | "[" | "(" | ".":
                self._at += 1
        match character:
            case '"':
                return _Terminal(quoted("".join(self._until('"'))))
            case "[":
                return _Terminal(self._set())
            case ".":
                return _Terminal(f"/{written(ALL)}/")
            case "(":
                options = self._options(depth + 1)
                self._skip(_SPACE_AND_LINES)
                if not self._text.startswith(")", self._at):
                    raise self._wrong("a ( is not closed")
                self._at += 1
                return _Choice(options)
        name = _NAME.match(self._text, self._at)
        if name is None:
            raise self._wrong("this is no part of a rule")
        self._at = name.end()
        return _Name(name[0])

    def _quantifier(self) -> str:
        character = self._text[self._at : self._at + 1]
        if character and character in "*+?":
            self._at += 1
            return character
        count = _COUNT.match(self._text, self._at) if character == "{" else None
        if count is None or not (count[1] or count[3]):
            return ""
        least, most = int(count[1][:9] or 0), int(count[3][:9] or 0)
        if max(least, most) > MAX_REPEAT:
            raise self._wrong(f"{count[0]} repeats more than {MAX_REPEAT} times")
        if count[3] and most < least:
            raise self._wrong(f"the bounds of {count[0]} are out of order")
        self._at = count.end()
        return f"{{{least}{count[2]}{most if count[3] else ''}}}"

    def _until(self, end: str) -> Iterator[str]:
        while True:
            character = self._text[self._at : self._at + 1]
            if character in ("", "\n"):
                raise self._wrong(f"{end} is missing")
            self._at += 1
            if character == end:
                return
            yield self._escaped() if character == "\\" else character

    def _escaped(self) -> str:
        letter = self._text[self._at : self._at + 1]
        self._at += 1
        if letter in _HEX:
            digits = self._text[self._at : self._at + _HEX[letter]]
            if len(digits) != _HEX[letter] or not re.fullmatch("[0-9a-fA-F]+", digits):
                raise self._wrong(f"\\{letter} needs {_HEX[letter]} hexadecimal digits")
            code = int(digits, 16)
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                raise self._wrong(f"\\{letter}{digits} is no character")
            self._at += len(digits)
            return chr(code)
        if letter in _CONTROLS:
            return _CONTROLS[letter]
        if letter and letter in '"\\[]-^/':
            return letter
        raise self._wrong(f"the escape \\{letter} is not known")

    def _set(self) -> str:
        is_inverse = self._text.startswith("^", self._at)
        self._at += is_inverse
        ranges: list[tuple[int, int]] = []
        dash = False
        while True:
            character = self._text[self._at : self._at + 1]
            escaped = character == "\\"
            try:
                one = next(self._until("]"))
            except StopIteration:
                break
            if dash and ranges:
                if ord(one) < ranges[-1][0]:
                    raise self._wrong("a range of characters is out of order")
                ranges[-1] = (ranges[-1][0], ord(one))
                dash = False
            elif one == "-" and not escaped and ranges and not self._text.startswith("]", self._at):
                dash = True
            else:
                ranges.append((ord(one), ord(one)))
        found = inverse(ranges) if is_inverse else normal(ranges)
        if not found:
            raise self._wrong("a set has no characters")
        return f"/{written(found)}/"


class _Writer:
    def __init__(self, rules: dict[str, _Choice]) -> None:
        self._rules = rules
        for name, rule in rules.items():
            missing = next((each for each in _names(rule) if each not in rules), None)
            if missing is not None:
                raise ConstraintError(f"grammar: the rule {name!r} names {missing!r}, which is no rule")
        self._regular = self._find_regular()
        self._numbers = {name: number for number, name in enumerate(rules)}
        self._lines: list[str] = []
        self._num_joined = 0

    def _find_regular(self) -> set[str]:
        """The rules from which no recursive rule is reached."""
        found: set[str] = set()
        while True:
            more = {name for name, rule in self._rules.items() if name not in found and set(_names(rule)) <= found}
            if not more:
                return found
            found |= more

    def lark(self) -> str:
        reached = self._reached()
        for name, rule in self._rules.items():
            if name not in reached:
                continue
            if name in self._regular:
                self._lines.append(f"T{self._numbers[name]}: {self._terminal(rule)}")
            else:
                self._lines.append(f"r{self._numbers[name]}: {self._rule(rule)}")
        root = f"{'T' if 'root' in self._regular else 'r'}{self._numbers['root']}"
        return "\n".join([f"start: {root}", *self._lines]) + "\n"

    def _reached(self) -> set[str]:
        found, waiting = set[str](), ["root"]
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting += _names(self._rules[name])
        return found

    def _is_regular(self, part: _Part) -> bool:
        return set(_names(part)) <= self._regular

    def _terminal(self, part: _Part) -> str:
        match part:
            case _Terminal(text):
                return text
            case _Name(name):
                return f"T{self._numbers[name]}"
            case _Choice(options, quantifier):
                written = " | ".join(" ".join(map(self._terminal, option)) or '""' for option in options)
                return f"({written}){quantifier}"

    def _rule(self, part: _Part) -> str:
        match part:
            case _Name(name) if name not in self._regular:
                return f"r{self._numbers[name]}"
            case _Choice(options, quantifier) if not self._is_regular(part):
                written = " | ".join(" ".join(self._joined(option)) for option in options)
                return f"({written}){quantifier}"
        return self._named(self._terminal(part))

    def _joined(self, parts: tuple[_Part, ...]) -> Iterator[str]:
        """Writes a sequence, neighbours without recursion as one terminal."""
        run: list[str] = []
        for part in parts:
            if self._is_regular(part):
                run.append(self._terminal(part))
                continue
            if run:
                yield self._named(" ".join(run))
                run = []
            yield self._rule(part)
        if run or not parts:
            yield self._named(" ".join(run)) if run else '""'

    def _named(self, terminal: str) -> str:
        self._num_joined += 1
        self._lines.append(f"J{self._num_joined}: {terminal}")
        return f"J{self._num_joined}"


def _names(part: _Part) -> Iterator[str]:
    if isinstance(part, _Name):
        yield part.name
    elif isinstance(part, _Choice):
        for option in part.options:
            for each in option:
                yield from _names(each)


def canonical_grammar(text: str, field: str = "grammar") -> str:
    """Returns a grammar in Lark's syntax. Raises ConstraintError."""
    check_size(text, field)
    if is_gbnf(text):
        text = lark_of_gbnf(text)
        check_size(text, f"{field}, converted to Lark,")
    elif not re.search(r"^[^\S\n]*\??start\b[^:\n]*:", text, re.MULTILINE):
        raise ConstraintError(
            f"{field} has neither a rule `start:` (Lark's syntax) nor `root ::=` (GBNF): no other syntax is supported"
        )
    return check_lark(text, field)
