"""Gemma's calls: call:NAME{key:value,...}, with marks around strings (Gemma 4 and FunctionGemma)."""

import re
from collections.abc import Callable

from router.parsing.deltas import Deltas
from router.parsing.formats.converted import ConvertedCall, items
from router.parsing.json_text import as_json
from router.parsing.source import Malformed, Marks, Reading, Source
from router.parsing.tools import Tools, typed_json

_NAME = re.compile(r"[\w.\-]+")
_KEY = re.compile(r"[^:,<>{}\[\]\s]+")
_MAX_NAME_CHARS = 256
# Numbers, words and strings without marks.
_BARE = re.compile(r"[^,{}\[\]<>]+")
_MAX_BARE_CHARS = 4096
_MAX_DEPTH = 64
# What is known of the types inside of objects and lists.
_ANY: frozenset[str] = frozenset()

Emit = Callable[[str], None]
TypesOf = Callable[[str], frozenset[str]]


class Gemma:
    """One of the two notations, by its marks."""

    def __init__(self, begin: str, end: str, quote: str) -> None:
        self._begin = Marks(begin)
        self._end = end
        self._quote = quote
        self._quotes = Marks(quote)

    def __call__(self, source: Source, deltas: Deltas, tools: Tools) -> Reading[None]:
        while mark := (yield from source.until(self._begin, deltas.content)):
            source.hold()
            try:
                source.take(len(mark))
                yield from source.expect("call:")
                name = yield from source.run(_NAME, _MAX_NAME_CHARS)
                if not name or (yield from source.peek()) != "{":
                    raise Malformed
                call = ConvertedCall(source, deltas, name)
                yield from self._object(source, call.emit, 1, lambda key, name=name: tools.types(name, key))
                source.hold()
                if (yield from source.one_of((self._end,))):
                    source.forget()
            except Malformed:
                deltas.malformed(source.release())
            deltas.content(source.release())

    def _object(self, source: Source, emit: Emit, depth: int, types_of: TypesOf) -> Reading[None]:
        source.take(1)
        before = "{"
        yield from source.spaces()
        while not (yield from source.one_of(("}",))):
            key = yield from self._key(source)
            yield from source.spaces()
            yield from source.expect(":")
            yield from source.spaces()
            emit(f'{before}"{as_json(key)}": ')
            before = ", "
            yield from self._value(source, emit, depth, types_of(key))
            yield from source.spaces()
            if not (yield from source.one_of((",",))):
                yield from source.expect("}")
                break
            yield from source.spaces()
        emit("{}" if before == "{" else "}")

    def _key(self, source: Source) -> Reading[str]:
        if (yield from source.one_of((self._quote,))):
            return (yield from self._quoted(source))
        key = yield from source.run(_KEY, _MAX_NAME_CHARS)
        if not key:
            raise Malformed
        return key

    def _value(self, source: Source, emit: Emit, depth: int, types: frozenset[str]) -> Reading[None]:
        if depth > _MAX_DEPTH:
            raise Malformed
        if (yield from source.one_of((self._quote,))):
            if types and "string" not in types:
                emit(typed_json((yield from self._quoted(source)), types))
                return
            emit('"')
            yield from self._to_quote(source, lambda text: emit(as_json(text)))
            emit('"')
        elif (yield from source.peek()) == "{":
            yield from self._object(source, emit, depth + 1, lambda key: _ANY)
        elif (yield from source.peek()) == "[":
            yield from items(source, emit, "[]", lambda: self._value(source, emit, depth + 1, _ANY))
        else:
            text = (yield from source.run(_BARE, _MAX_BARE_CHARS)).strip()
            if not text:
                raise Malformed
            emit(typed_json(text, types))

    def _quoted(self, source: Source) -> Reading[str]:
        parts: list[str] = []
        yield from self._to_quote(source, parts.append)
        return "".join(parts)

    def _to_quote(self, source: Source, emit: Emit) -> Reading[None]:
        mark = yield from source.until(self._quotes, emit)
        if not mark:
            raise Malformed
        source.take(len(mark))
