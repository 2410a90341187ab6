"""Calls written in Python: [f(a=1, b='x'), g()]; Llama 3.2 and 4, Gemma 3, ToolACE."""

import ast
import json
import re
from collections.abc import Callable

from router.parsing.deltas import Deltas
from router.parsing.formats.converted import ConvertedCall, items
from router.parsing.json_text import as_json
from router.parsing.source import Malformed, Marks, Reading, Source
from router.parsing.tools import Tools

_MARKS = Marks("<|python_start|>")
_NAME = re.compile(r"[\w.]+")
_MAX_NAME_CHARS = 256
_IDENTIFIER = re.compile(r"\w+")
# Numbers and words, before it is known which.
_SCALAR = re.compile(r"[\w.+\-]+")
_MAX_SCALAR_CHARS = 1024
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9]\d{0,15})(?:\.\d{1,15})?", re.ASCII)
# As vLLM, which takes JSON's words too.
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_MAX_DEPTH = 64

_CHARS = {"'": re.compile(r"[^'\\\r\n]+"), '"': re.compile(r'[^"\\\r\n]+')}
_ESCAPES = {"\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_HEX = re.compile(r"[0-9a-fA-F]")
_OCTAL = re.compile(r"[0-7]")

Emit = Callable[[str], None]


def pythonic(source: Source, deltas: Deltas, tools: Tools) -> Reading[None]:
    """A list of calls at the beginning of the text, or behind <|python_start|>."""
    source.hold()
    yield from source.spaces()
    if (yield from source.peek()) == "[":
        yield from _try_calls(source, deltas)
    deltas.content(source.release())
    while mark := (yield from source.until(_MARKS, deltas.content)):
        source.hold()
        source.take(len(mark))
        yield from source.spaces()
        yield from _try_calls(source, deltas)
        deltas.content(source.release())


def _try_calls(source: Source, deltas: Deltas) -> Reading[None]:
    num_before = deltas.num_begun
    try:
        yield from source.expect("[")
        follows = ","
        while follows == ",":
            yield from source.spaces()
            # A comma may stand behind the last one.
            if deltas.num_begun > num_before and (follows := (yield from source.one_of(("]",)))):
                break
            yield from _call(source, deltas)
            source.hold()
            yield from source.spaces()
            follows = yield from source.one_of((",", "]"))
        if not follows:
            raise Malformed
        source.hold()
        yield from source.spaces()
        if (yield from source.one_of(("<|python_end|>",))):
            source.forget()
    except Malformed:
        held = source.release()
        # A bracket alone is no sign of a call.
        if deltas.num_begun > num_before or "(" in held:
            deltas.malformed(held)
        else:
            deltas.content(held)


def _call(source: Source, deltas: Deltas) -> Reading[None]:
    """Takes name(key=value, ...). Raises Malformed, also for positional arguments and keys that come twice."""
    name = yield from source.run(_NAME, _MAX_NAME_CHARS)
    if not name or name[0] in "0123456789." or not (yield from source.one_of(("(",))):
        raise Malformed
    emit = ConvertedCall(source, deltas, name).emit
    keys: set[str] = set()
    before = "{"
    yield from source.spaces()
    while not (yield from source.one_of((")",))):
        key = yield from source.run(_IDENTIFIER, _MAX_NAME_CHARS)
        yield from source.spaces()
        if not key or key in keys:
            raise Malformed
        keys.add(key)
        yield from source.expect("=")
        yield from source.spaces()
        emit(f'{before}"{as_json(key)}": ')
        before = ", "
        yield from _value(source, emit, 1)
        yield from source.spaces()
        if not (yield from source.one_of((",",))):
            yield from source.expect(")")
            break
        yield from source.spaces()
    emit("}" if keys else "{}")


def _value(source: Source, emit: Emit, depth: int) -> Reading[None]:
    """Takes a literal and gives it out as JSON. Raises Malformed."""
    if depth > _MAX_DEPTH:
        raise Malformed
    first = yield from source.peek()
    if first in ("'", '"'):
        yield from _string(source, emit)
    elif first == "[":
        yield from items(source, emit, "[]", lambda: _value(source, emit, depth + 1))
    elif first == "{":
        yield from items(source, emit, "{}", lambda: _entry(source, emit, depth + 1))
    else:
        emit(_scalar_json((yield from source.run(_SCALAR, _MAX_SCALAR_CHARS))))


def _entry(source: Source, emit: Emit, depth: int) -> Reading[None]:
    """Takes a key and a value of a dict."""
    if (yield from source.peek()) not in ("'", '"'):
        raise Malformed
    yield from _string(source, emit)
    yield from source.spaces()
    yield from source.expect(":")
    yield from source.spaces()
    emit(": ")
    yield from _value(source, emit, depth)


def _scalar_json(text: str) -> str:
    """Raises Malformed."""
    if text in _WORDS:
        return _WORDS[text]
    if _JSON_NUMBER.fullmatch(text):
        return text
    try:
        value = ast.literal_eval(text)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return json.dumps(value, allow_nan=False)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        pass
    raise Malformed


def _string(source: Source, emit: Emit) -> Reading[None]:
    quote = source.take(1)
    emit('"')
    while True:
        match = None
        if (yield from source.peek()):
            match = _CHARS[quote].match(source.text, source.position)
        if match is not None:
            emit(as_json(source.take(match.end() - match.start())))
        elif (yield from source.one_of((quote,))):
            break
        else:
            yield from source.expect("\\")
            yield from _escape(source, emit)
    emit('"')


def _escape(source: Source, emit: Emit) -> Reading[None]:
    """Takes what follows a backslash. One that Python does not know stands for itself, as in Python."""
    char = yield from source.peek()
    if not char:
        raise Malformed
    if char in _HEX_DIGITS:
        source.take(1)
        digits = yield from _digits(source, _HEX, _HEX_DIGITS[char])
        code = int(digits, 16) if len(digits) == _HEX_DIGITS[char] else -1
        if not 0 <= code <= 0x10FFFF:
            raise Malformed
        emit(as_json(chr(code)))
    elif _OCTAL.match(char):
        emit(as_json(chr(int((yield from _digits(source, _OCTAL, 3)), 8))))
    elif char in _ESCAPES:
        emit(as_json(_ESCAPES[source.take(1)]))
    elif char == "\n":
        source.take(1)
    else:
        emit(as_json("\\"))


def _digits(source: Source, pattern: re.Pattern[str], most: int) -> Reading[str]:
    digits = ""
    while len(digits) < most and pattern.match((yield from source.peek())):
        digits += source.take(1)
    return digits
