"""A pass over a batch: a line that gets no answer, or makes its request fail, holds no other line."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from router.batches.journal import Journal
from router.batches.lines import LineReader
from router.batches.run import BatchRun, Later, PassEnd
from router.batches.sending import PutOff, SendingError

KEY = "0" * 32


def write(folder: Path, num_lines: int) -> Path:
    path = folder / "in.jsonl"
    path.write_text(
        "".join(
            f'{{"custom_id":"{number}","url":"/v1/completions","body":{{"n":{number}}}}}\n'
            for number in range(1, num_lines + 1)
        )
    )
    return path


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[Journal]:
    opened = Journal(tmp_path / "out.jsonl", KEY)
    yield opened
    await opened.close()


def outputs(journal: Journal) -> dict[str, object]:
    """For each line the status of its answer, or its error's code."""
    found = [msgspec.json.decode(each) for each in journal.path.read_bytes().splitlines()]
    assert len({each["id"] for each in found}) == len(found)
    return {
        each["custom_id"]: each["response"]["status_code"] if each["response"] else each["error"]["code"]
        for each in found
    }


class Server:
    """Answers lines, but for those that are told to do something else."""

    def __init__(self, **others: BaseException | asyncio.Event) -> None:
        self.others, self.asked = {int(name[1:]): what for name, what in others.items()}, list[int]()

    async def send(self, url: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        number = msgspec.json.decode(body)["n"]
        self.asked.append(number)
        what = self.others.get(number)
        if isinstance(what, BaseException):
            raise what
        return 200, b"{}"


async def one_pass(path: Path, journal: Journal, server: Server, later: Later, concurrency: int = 2) -> PassEnd:
    with LineReader(path, 1000) as reader:
        run = BatchRun(KEY, reader, journal, journal, server.send, concurrency=concurrency, later=later)
        return await run.run()


async def test_a_request_that_fails_or_is_cancelled_is_its_lines_error(tmp_path: Path, journal: Journal) -> None:
    server = Server(_1=ValueError("x"), _2=asyncio.CancelledError(), _3=RecursionError(), _4=OSError(28, "full"))
    assert await one_pass(write(tmp_path, 6), journal, server, Later()) is PassEnd.ALL_DONE
    assert outputs(journal) == {
        "1": "internal_error",
        "2": "cancelled",
        "3": "internal_error",
        "4": "internal_error",
        "5": 200,
        "6": 200,
    }


async def test_lines_that_are_refused_go_behind_all_others(tmp_path: Path, journal: Journal) -> None:
    full = PutOff("full", (429, b""), is_its_own=False)
    own, broken = PutOff("late", (504, b"{}"), is_its_own=True), PutOff("reset", None, is_its_own=True)
    server, later, path = Server(_1=full, _2=own, _4=broken), Later(), write(tmp_path, 9)
    # Two in succession: nobody may be answered, so that another batch comes first.
    assert await one_pass(path, journal, server, later) is PassEnd.LINES_LEFT
    assert not outputs(journal)
    # The next turn begins behind them.
    assert await one_pass(path, journal, server, later) is PassEnd.LINES_LEFT
    assert outputs(journal) == {str(number): 200 for number in (3, 5, 6, 7, 8, 9)}
    # Others were answered: what comes from the line itself is its answer, what tells of the server is not.
    assert await one_pass(path, journal, server, later) is PassEnd.LINES_LEFT
    assert {name: what for name, what in outputs(journal).items() if what != 200} == {"2": 504, "4": "no_answer"}
    server.others.clear()
    assert await one_pass(path, journal, server, later) is PassEnd.ALL_DONE
    assert outputs(journal)["1"] == 200
    assert server.asked.count(3) == 1


async def test_a_line_is_not_settled_early_or_while_nobody_is_answered(tmp_path: Path, journal: Journal) -> None:
    server = Server(_1=PutOff("late", (504, b"{}"), is_its_own=True))
    path, later = write(tmp_path, 2), Later(settle_s=3600)
    for _ in range(3):
        assert await one_pass(path, journal, server, later) is PassEnd.LINES_LEFT
    assert outputs(journal) == {"2": 200}
    alone = Later()
    for _ in range(3):
        assert await one_pass(path, journal, server, alone) is PassEnd.LINES_LEFT
    assert outputs(journal) == {"2": 200}


async def test_a_server_that_refuses_every_line_ends_the_pass(tmp_path: Path, journal: Journal) -> None:
    with pytest.raises(SendingError, match="401"):
        await one_pass(write(tmp_path, 3), journal, Server(_1=SendingError("401 for every line")), Later())
