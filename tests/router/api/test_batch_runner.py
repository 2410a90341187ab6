"""Batches that fail, wait or are cancelled: none holds the next one, each ends, and a full disk loses nothing."""

import asyncio
import errno
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.types import Receive, Scope, Send

from router.api.gateway.batches import runner as runner_module
from router.api.gateway.batches import store as store_module
from router.api.gateway.batches.records import ENDED, Batch, Record, create
from router.api.gateway.batches.runner import Runner
from router.api.gateway.batches.store import BatchStore, new_id
from router.security.identity import ANYONE

URL = "/v1/completions"

_AN_HOUR = 3600


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_POLL_S", "_TROUBLE_S", "_PATIENCE_S"):
        monkeypatch.setattr(runner_module, name, 0.02)


@pytest.fixture
def store(tmp_path: Path) -> BatchStore:
    return BatchStore(tmp_path / "batches", 2**24)


class Disk:
    """Lets calls of the system fail as on a full disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full: set[str] = set()
        self.refused = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        for name in ("mkdir", "link", "replace", "write", "fsync", "ftruncate"):
            monkeypatch.setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            if name in self.full:
                self._loop.call_soon_threadsafe(self.refused.set)
                raise OSError(errno.ENOSPC, "No space left on device")
            return call(*arguments, **named)

        return wrapped


@pytest.fixture
async def disk(monkeypatch: pytest.MonkeyPatch, store: BatchStore) -> Disk:
    return Disk(monkeypatch)


class Server:
    """Answers lines. A line may be one that is never answered while `is_busy`."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.is_busy = False
        self.asked_busy = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        what = json.loads((await receive())["body"])["what"]
        self.asked.append(what)
        if what == "raises":
            raise LookupError("a handler fails")
        status = 200
        if what == "busy" and self.is_busy:
            self.asked_busy.set()
            status = 504
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b'{"a":1}'})


def line(custom_id: str, what: str = "good") -> str:
    return json.dumps({"custom_id": custom_id, "url": URL, "body": {"what": what}})


def make(store: BatchStore, *lines: str, **fields: Any) -> Batch:
    now = int(time.time())
    record = Record(
        **{
            "id": new_id("batch_"),
            "tenant": "",
            "key_digest": "",
            "endpoint": URL,
            "input_file_id": "",
            "completion_window": "24h",
            "created_at": now,
            "expires_at": now + 1000,
            "metadata": None,
            "answers_id": new_id("file-"),
            "problems_id": new_id("file-"),
            **fields,
        }
    )
    folder = store.batch_folder("", record.id)
    assert folder is not None
    part = store.new_part("")
    part.write_text("\n".join(lines))
    batch = Batch(folder)
    try:
        create(store, batch, record, part)
    finally:
        part.unlink()
    return batch


@asynccontextmanager
async def running(store: BatchStore, server: Server) -> AsyncIterator[Runner]:
    made = Runner(store, server, lambda *_: ANYONE, CollectorRegistry(), concurrency=2, max_line_bytes=10_000)
    made.start()
    try:
        yield made
    finally:
        await made.stop()


async def ended(batch: Batch) -> Record:
    tenant = batch.folder.parents[1]
    entry = tenant.parent / "queue" / f"{tenant.name}.{batch.folder.name}"
    async with asyncio.timeout(20):
        # The last step takes it out of the queue.
        while (record := batch.read()) is None or record.status not in ENDED or entry.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return record


def outputs(store: BatchStore, record: Record) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for file_id in (record.answers_id, record.problems_id):
        if store.file("", file_id) is not None:
            for text in store.content("", file_id).read_bytes().splitlines():
                told = json.loads(text)
                assert told["custom_id"] not in found
                found[told["custom_id"]] = (told["response"] or {}).get("status_code") or told["error"]["code"]
    return found


async def test_a_poisoned_line_costs_itself_alone(store: BatchStore) -> None:
    poisons = (
        r'{"custom_id":"p","url":"/v1/completions","body":{"stream":1e999}}',
        r'{"custom_id":"q","url":"/v1/completions","body":{"stream":%s}}' % ("1" * 5000),
        r'{"custom_id":"\ud800","url":"/v1/completions","body":{}}',
        line("r", "raises"),
    )
    async with running(store, Server()):
        record = await ended(make(store, *poisons, line("last")))
    assert record.status == "completed"
    assert outputs(store, record) == {
        "p": "invalid_body",
        "q": "invalid_body",
        None: "invalid_json_line",
        "r": 500,
        "last": 200,
    }
    assert (record.num_lines, record.num_successes, record.num_failures) == (5, 1, 4)


async def test_a_batch_that_fails_each_time_holds_nobody_and_fails_at_last(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reader(runner_module.LineReader):
        def next(self) -> Any:
            if b"poison" in Path(self._file.name).read_bytes():
                raise LookupError("nobody has thought of this")
            return super().next()

    monkeypatch.setattr(runner_module, "LineReader", Reader)
    poison, good = make(store, line("poison")), make(store, line("good"))
    os.utime(store.entry_of(poison.folder), (1, 1))
    async with running(store, Server()):
        assert (await ended(good)).status == "completed"
        record = await ended(poison)
    assert record.status == "failed"
    assert "5 tries" in record.faults[0].message
    assert "LookupError: nobody has thought of this" in record.faults[0].message
    assert not store.queue()


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("status", ["cancelled", "expired"])
async def test_a_batch_whose_passes_fail_at_once_can_be_ended(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch, is_restarted: bool, status: str
) -> None:
    """Also in the pause between two of them."""
    failed, compute = asyncio.Event(), runner_module.BatchRun.run

    async def fail(run: Any) -> Any:
        if run._refusal is not None:
            return await compute(run)
        failed.set()
        raise LookupError("a pass that fails at once")

    async def pause(self: Any, batch: Batch, error: Exception) -> int:
        return 20

    monkeypatch.setattr(runner_module.BatchRun, "run", fail)
    monkeypatch.setattr(Runner, "_note_failure", pause)
    batch = make(store, line("a"), expires_at=int(time.time()) + _AN_HOUR)
    async with running(store, Server()):
        await failed.wait()
        if status == "expired":
            now = time.time
            monkeypatch.setattr(time, "time", lambda: now() + 2 * _AN_HOUR)
        if not is_restarted and status == "cancelled":
            batch.cancel()
        record = None if is_restarted else await ended(batch)
    if record is None:
        if status == "cancelled":
            batch.cancel()
        async with running(store, Server()):
            record = await ended(batch)
    assert record.status == status
    assert outputs(store, record) == ({"a": "batch_expired"} if status == "expired" else {})


async def test_a_cancelled_batch_never_begins(store: BatchStore) -> None:
    batch, server = make(store, line("a")), Server()
    batch.cancel()
    async with running(store, server):
        assert (await ended(batch)).status == "cancelled"
    assert not server.asked


async def test_lines_without_an_answer_hold_neither_other_lines_nor_the_next_batch(store: BatchStore) -> None:
    server = Server()
    server.is_busy = True
    # More than are computed at once.
    stuck = make(store, *(line(str(i), "busy") for i in range(3)), line("behind"))
    os.utime(store.entry_of(stuck.folder), (1, 1))
    async with running(store, server):
        await server.asked_busy.wait()
        assert (await ended(make(store, line("next")))).status == "completed"
        server.is_busy = False
        record = await ended(stuck)
    assert outputs(store, record) == {"0": 200, "1": 200, "2": 200, "behind": 200}
    assert server.asked.count("good") == 2


@pytest.mark.parametrize("call", ["mkdir", "link", "replace", "fsync"])
async def test_a_batch_that_cannot_be_made_leaves_nothing(store: BatchStore, disk: Disk, call: str) -> None:
    make(store, line("a")).remove()
    for entry, _ in store.queue():
        entry.unlink()
    before = sorted(store._sizes())
    disk.full = {call}
    with pytest.raises(OSError, match="No space left"):
        make(store, line("a"))
    disk.full = set()
    assert not store.batch_folders("")
    assert not store.queue()
    assert sorted(store._sizes()) == before


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
async def test_a_batch_waits_for_room_and_loses_no_line(store: BatchStore, disk: Disk, call: str) -> None:
    batch = make(store, *(line(str(i)) for i in range(6)), line("bad", "raises"))
    disk.full = {call}
    async with running(store, Server()):
        await disk.refused.wait()
        record = batch.read()
        assert record is not None
        assert record.status not in ENDED
        disk.full = set()
        record = await ended(batch)
    assert record.status == "completed"
    assert outputs(store, record) == {**{str(i): 200 for i in range(6)}, "bad": 500}
    assert not [path for path in store._directory.rglob("*") if path.name.startswith(".part-")]


async def test_nothing_is_computed_for_a_full_disk(store: BatchStore, monkeypatch: pytest.MonkeyPatch) -> None:
    server, batch = Server(), make(store, line("a"))
    monkeypatch.setattr(store_module, "_LEAST_FREE", 2**62)
    looked = asyncio.Event()
    loop, check = asyncio.get_running_loop(), store.check_disk

    def checked() -> None:
        loop.call_soon_threadsafe(looked.set)
        check()

    monkeypatch.setattr(store, "check_disk", checked)
    async with running(store, server):
        await looked.wait()
        assert not server.asked
        monkeypatch.setattr(store_module, "_LEAST_FREE", 0)
        assert (await ended(batch)).status == "completed"
    assert server.asked == ["good"]


async def test_what_was_never_finished_is_removed_at_the_start(store: BatchStore) -> None:
    kept, lost, waiting = make(store, line("a")), make(store, line("b")), make(store, line("c"))
    # As kills, and failures of older versions, leave them.
    (lost.folder / "record.json").unlink()
    store.entry_of(lost.folder).unlink()
    (waiting.folder / "record.json").unlink()
    os.utime(store.entry_of(waiting.folder), (1, 1))
    record = kept.read()
    assert record is not None
    orphan, output = store.content("", new_id("file-")), store.content("", record.answers_id)
    for path in (orphan, output):
        path.write_bytes(b"x")
        os.utime(path, (1, 1))
    store.sweep()
    assert (lost.folder.exists(), waiting.folder.exists(), kept.folder.exists()) == (False, True, True)
    assert (orphan.exists(), output.exists()) == (False, True)
    async with running(store, Server()):
        assert (await ended(kept)).status == "completed"
        async with asyncio.timeout(20):
            while store.queue():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert not waiting.folder.exists()


async def test_a_record_that_cannot_be_read_holds_nobody(store: BatchStore, monkeypatch: pytest.MonkeyPatch) -> None:
    # It is tried again at every look, so only its place in the queue lets others go on.
    monkeypatch.setattr(runner_module, "_TROUBLE_S", 0.0)
    damaged = make(store, line("a"))
    os.utime(store.entry_of(damaged.folder), (1, 1))
    (damaged.folder / "record.json").write_bytes(b'{"id":"\xff')
    async with running(store, Server()):
        assert (await ended(make(store, line("b")))).status == "completed"
    # It may be another version's.
    assert damaged.folder.exists()


@pytest.mark.parametrize("num_turns", range(5))
async def test_a_stop_ends_a_look_that_was_just_woken(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch, num_turns: int
) -> None:
    """Before, the stop could be lost with the wait that ended at the same time, and the router never ended."""
    monkeypatch.setattr(runner_module, "_POLL_S", 3600.0)
    looked = asyncio.Event()
    loop, queue = asyncio.get_running_loop(), store.queue

    def look() -> list[tuple[Path, Path]]:
        loop.call_soon_threadsafe(looked.set)
        return queue()

    monkeypatch.setattr(store, "queue", look)
    async with asyncio.timeout(20):
        async with running(store, Server()) as runner:
            await looked.wait()
            # It waits for a wake now.
            await asyncio.sleep(0.05)
            runner.wake()
            for _ in range(num_turns):
                await asyncio.sleep(0)
