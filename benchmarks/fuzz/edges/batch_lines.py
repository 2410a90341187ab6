"""Files of batches: lines that are no JSON, are damaged, or have values that nobody should send."""

import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.fuzz.edge import Edge
from benchmarks.fuzz.mutation import change_bytes
from router.api.gateway.errors import BadRequestError
from router.api.gateway.reading import parsing
from router.api.gateway.reading.parsing import Kind
from router.batches.answers import answer_line, line_id, problem_line, read_back
from router.batches.lines import ENDPOINTS, Line, LineReader, summary_of

_KEY = "0123456789abcdef" * 2
_MOST_BYTES = 20_000
_KINDS: dict[str, Kind] = dict(zip(ENDPOINTS, ("chat", "completion", "response"), strict=True))
_LAST = b'{"custom_id":"the last one","method":"POST","url":"/v1/completions","body":{"prompt":"Hi"}}'
_GOOD: tuple[dict[str, Any], ...] = (
    {"custom_id": "a", "method": "POST", "url": ENDPOINTS[1], "body": {"prompt": "Hi", "max_tokens": 2}},
    {"custom_id": "b", "url": ENDPOINTS[0], "body": {"messages": [{"role": "user", "content": "Hi"}], "stream": False}},
    {"custom_id": "c", "method": "POST", "url": ENDPOINTS[2], "body": {"input": "Hi", "metadata": {"k": "v"}}},
)
_PLACES = ("custom_id", "method", "url", "body", "stream", "unknown", "")
# In JSON, or nearly.
_VALUES = (
    b"null",
    b"true",
    b"0",
    b"-1",
    b"1e999",
    b"-1e-999",
    b"1" * 5000,
    b"0." + b"1" * 5000,
    b"NaN",
    b"01",
    b'""',
    b'"a"',
    b'"\xff"',
    b'"\xed\xa0\x80"',
    b'"\\ud800"',
    b'"\\udc00x"',
    b'"\\ud83d\\ude00"',
    b'"\\u0000"',
    b'"\0"',
    b'"\\q"',
    b'"' + b"z" * 3000 + b'"',
    b'"\xe2\x80\xa8\xc2\x85"',
    b"[]",
    b"{}",
    b"[" * 900 + b"]" * 900,
    b"[" * 9000,
    b"[[],[]]",
    b'{"a":' * 700 + b"1" + b"}" * 700,
    b'{"stream":true}',
    b'{"stream":"\xff","prompt":1}',
    b'{"\xff":1}',
)
_LINES = (
    b"",
    b" \t",
    b"\0",
    b"{",
    b"[1]",
    b"\xef\xbb\xbf{}",
    b"\xff\xfe{\0}\0",
    b"null",
    b"x" * 30_000,
    b"\r",
    b"{}\x85{}",
)


class BatchLines:
    """A message is a file; a good line is added to it, and has to be read in any case."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def malformed(self, random: Random) -> bytes:
        return b"\n".join(_line(random) for _ in range(random.choice((1, 1, 2, 5))))

    async def feed(self, message: bytes) -> str:
        self._path.write_bytes(message + b"\n" + _LAST)
        became, numbers, custom_id = "only the last", [0], None
        with LineReader(self._path, _MOST_BYTES) as reader:
            while (line := reader.next()) is not None:
                _check_output(line)
                numbers.append(line.number)
                custom_id = line.custom_id
                if len(numbers) == 2:
                    became = line.problem.code if line.problem is not None else _parsed(line)
        assert custom_id == "the last one", "the line behind is not read"
        assert all(before < after for before, after in itertools.pairwise(numbers))
        assert summary_of(self._path).num_lines == len(numbers) - 1
        return became

    async def check(self) -> None:
        assert await self.feed(json.dumps(_GOOD[0]).encode()) == "computed"


def _check_output(line: Line) -> None:
    """Checks that whatever is written about a line is one line of JSON in UTF-8 that is read back."""
    # A server's answer may be any bytes, too.
    written = [answer_line(_KEY, line, status, line.body) for status in (200, 400)]
    if line.problem is not None:
        written.append(problem_line(_KEY, line, line.problem))
    for each in written:
        text = each.decode()
        assert text.splitlines(keepends=True) == [text]
        assert read_back(_KEY, each)[0] == line.number
        # Python's own parser takes no numbers of more than 4,300 digits, unless it is told how.
        assert json.loads(text, parse_int=str)["id"] == line_id(_KEY, line.number)


def _parsed(line: Line) -> str:
    try:
        parsing.parse(_KINDS[line.url], line.body, "id", is_strict=False)
    except BadRequestError:
        return "refused by the endpoint"
    return "computed"


def _line(random: Random) -> bytes:
    if random.random() < 0.1:
        return random.choice(_LINES)
    line = json.dumps(random.choice(_GOOD)).encode()
    for _ in range(random.choice((0, 1, 1, 2))):
        name = json.dumps(random.choice(_PLACES)).encode()
        # Twice, if it is there: the last one counts.
        at = random.choice((line.index(b"{") + 1, line.rindex(b"{") + 1))
        line = line[:at] + name + b":" + random.choice(_VALUES) + b"," + line[at:]
        if random.random() < 0.5:
            line = line.replace(b'"a"', random.choice(_VALUES), 1).replace(b'"POST"', random.choice(_VALUES), 1)
        if random.random() < 0.5:
            line = line.replace(b'"Hi"', random.choice(_VALUES), 1).replace(b"false", random.choice(_VALUES), 1)
    return change_bytes(line, random) if random.random() < 0.4 else line


@asynccontextmanager
async def batch_lines(directory: Path) -> AsyncIterator[Edge]:
    yield BatchLines(directory / "in.jsonl")
