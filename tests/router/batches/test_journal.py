"""The output of a batch: what a kill or a full disk leaves of it, and who may write it."""

import errno
import os
from pathlib import Path

import pytest

from router.batches.answers import answer_line, problem_line
from router.batches.journal import Journal, JournalError
from router.batches.lines import Line, Problem

KEY = "0123456789abcdef" * 4


def written(number: int) -> bytes:
    return answer_line(KEY, Line(number, f"id-{number}"), 200, b'{"x": 1}')


async def test_a_torn_end_is_cut_off_at_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "out.part"
    whole, last = written(1) + problem_line(KEY, Line(7), Problem("c", "m")), written(3)
    for size in range(len(last)):
        path.write_bytes(whole + last[:size])
        journal = Journal(path, KEY)
        assert (journal.num_lines, journal.num_successes) == (2, 1)
        assert [number for number in range(10) if number in journal] == [1, 7]
        await journal.append(last, 3, is_success=True)
        await journal.close()
        assert path.read_bytes() == whole + last
    # A machine that fails may leave blocks of zeros.
    path.write_bytes(whole + b"\0" * 5000 + b"\n")
    await Journal(path, KEY).close()
    assert path.read_bytes() == whole


@pytest.mark.parametrize("text", [b"my notes", b"my notes\n", written(1).replace(b"_0123", b"_4567")])
async def test_a_file_of_others_is_left_alone(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "out.part"
    path.write_bytes(text)
    with pytest.raises(JournalError, match="remove the file, or name another output"):
        Journal(path, KEY)
    assert path.read_bytes() == text


async def test_one_writer_at_a_time(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "out.part", KEY)
    with pytest.raises(JournalError, match="another process writes it"):
        Journal(tmp_path / "out.part", KEY)
    journal.publish(tmp_path / "out")
    second = Journal(tmp_path / "out.part", KEY)
    await second.close()
    await journal.close()


async def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write = tmp_path / "out.part", os.write
    journal = Journal(path, KEY)
    await journal.append(written(1), 1, is_success=True)
    calls = []

    def half(file: int, data: bytes) -> int:
        calls.append(data)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(JournalError, match="No space left"):
        await journal.append(written(2), 2, is_success=True)
    await journal.close()
    assert path.read_bytes() == written(1)
    assert 2 not in journal


def test_a_line_has_no_line_ends_within(tmp_path: Path) -> None:
    for body in (b'{\n "text": "a\xe2\x80\xa8b"\n}', '{"text": "\x85"}'.encode(), b"<html>\n</html>\n", b"", b"\xff\n"):
        line = answer_line(KEY, Line(1, "\u2029"), 502, body)
        assert len(line.decode().splitlines()) == 1
