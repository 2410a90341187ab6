"""Output lines of large answers: taken over in parts, and the same as when they are encoded at once."""

import json

import msgspec
import pytest

from router.batches import answers
from router.batches.answers import answer_line
from router.batches.lines import Line

KEY = "ab" * 32


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 1000])
def test_an_answer_of_this_process_is_taken_over_in_parts(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts fall into characters of two to four bytes, and into those that end a line for some readers."""
    monkeypatch.setattr(answers, "_PART_BYTES", 4)
    body = msgspec.json.encode({"text": "x" * size + "\u2028\x85é\U0001f600\u2029" * 20, "none": None})
    line = Line(7, "an-id")
    own = answer_line(KEY, line, 200, body, is_own=True)
    assert own == answer_line(KEY, line, 200, body)
    assert len(own.decode().splitlines()) == 1
    assert json.loads(own)["response"]["body"] == json.loads(body)


def test_an_answer_without_a_body_is_an_empty_text() -> None:
    assert json.loads(answer_line(KEY, Line(1, "an-id"), 204, b"", is_own=True))["response"]["body"] == ""
