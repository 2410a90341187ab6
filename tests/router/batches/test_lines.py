"""A batch is read line by line: nothing that a line holds keeps others from being read."""

import json
from pathlib import Path

import pytest

from router.batches.answers import answer_line, problem_line, read_back
from router.batches.lines import Line, LineReader, summary_of

GOOD = b'{"custom_id":"%d","method":"POST","url":"/v1/completions","body":{"prompt":"x"}}'


def test_a_line_that_is_too_long_is_skipped_and_never_held(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD % 1 + b"\r\n\n" + b"x" * 3_000_000 + b"\n" + GOOD % 2 + b"\n \n" + GOOD % 3)
    with LineReader(path, most_bytes=200) as reader:
        lines = []
        while (line := reader.next()) is not None:
            lines.append(line)
    assert [(line.number, line.problem and line.problem.code) for line in lines] == [
        (1, None),
        (3, "line_too_long"),
        (4, None),
        (6, None),
    ]
    assert [line.custom_id for line in lines] == ["1", None, "2", "3"]
    assert lines[0].body == b'{"prompt":"x"}'
    assert summary_of(path).num_lines == 4


def test_a_file_without_lines(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    for text in (b"", b"\n \n\t"):
        path.write_bytes(text)
        assert summary_of(path).num_lines == 0
        with LineReader(path, 100) as reader:
            assert reader.next() is None


def line(custom_id: bytes = b'"a"', more: bytes = b"", body: bytes = b'{"prompt":"x"}') -> bytes:
    return b'{"custom_id":' + custom_id + more + b',"url":"/v1/completions","body":' + body + b"}"


@pytest.mark.parametrize(
    ("text", "code", "custom_id"),
    [
        # Values that were skipped once could be decoded a second time, and ended the reader.
        (line(body=b'{"stream":"\xff"}'), "invalid_body", "a"),
        (line(body=b'{"stream":1e999}'), "invalid_body", "a"),
        (line(body=b'{"stream":' + b"1" * 5000 + b"}"), "invalid_body", "a"),
        (line(body=b'{"stream":true,"prompt":"x"}'), "invalid_body", "a"),
        (line(body=b'{"stream":0}'), "invalid_body", "a"),
        (line(body=b'{"stream":"\\ud800"}'), "invalid_json_line", None),
        (line(b'"a\\ud800"'), "invalid_json_line", None),
        (line(b'"\xff"'), "invalid_json_line", None),
        (line(b'"\0"'), "invalid_json_line", None),
        (line(b"1" * 5000), "invalid_custom_id", None),
        (line(b'"' + b"z" * 100_000 + b'"'), "invalid_custom_id", None),
        (line(b'""'), "invalid_custom_id", None),
        (line(b"[" * 500 + b"]" * 500), "invalid_custom_id", None),
        (line(more=b',"method":' + b"1" * 5000), "invalid_method", "a"),
        (line(more=b',"method":1e999'), "invalid_method", "a"),
        (line(more=b',"method":"\xff"'), "invalid_json_line", "a"),
        (line(more=b',"x":' + b"[" * 5000), "invalid_json_line", None),
        (line(b'"a","custom_id":"b"', body=b"[]"), "invalid_body", "b"),
        (line().replace(b"/v1/completions", b"/v1/\xff"), "invalid_json_line", "a"),
        (line().replace(b'"/v1/completions"', b"1e999"), "invalid_url", "a"),
        (b"\0\0", "invalid_json_line", None),
        (b"\xff\xfe{\0}\0", "invalid_json_line", None),
    ],
)
def test_whatever_a_line_has_is_its_own_error(tmp_path: Path, text: bytes, code: str, custom_id: str | None) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(text + b"\n" + GOOD % 1)
    with LineReader(path, most_bytes=2**20) as reader:
        bad, good = reader.next(), reader.next()
    assert bad is not None
    assert bad.problem is not None
    assert (bad.problem.code, bad.custom_id) == (code, custom_id)
    # No value is shown as a whole.
    assert len(bad.problem.message) < 300
    written = problem_line("0" * 32, bad, bad.problem)
    assert json.loads(written.decode())["error"]["line"] == 1
    assert good is not None
    assert (good.custom_id, good.problem) == ("1", None)


@pytest.mark.parametrize(
    "body",
    [
        b'"\xff"',
        b'{"a":\n"\xff"}',
        b"1e999",
        b"1" * 5000,
        b'"\\ud800"',
        b"\0",
        b"",
        b"[" * 1000 + b"]" * 1000,
        b"[" * 1018 + b"]" * 1018,
        b"[" * 5000,
        b'{"a":\n' + b"1" * 5000 + b"}",
        b'"\xe2\x80\xa8"',
    ],
)
def test_an_answer_of_any_bytes_becomes_a_line_that_is_read_back(body: bytes) -> None:
    """One that is not read back would cut off what comes after it in the output."""
    written = answer_line("0" * 32, Line(7, "a"), 200, body)
    assert written.decode().splitlines(keepends=True) == [written.decode()]
    assert read_back("0" * 32, written) == (7, True)


def test_empty_lines_are_not_read_without_end(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n" * 100 + GOOD % 1)
    assert not summary_of(path, most_lines=50).is_whole
    assert summary_of(path, most_lines=101) == summary_of(path)
