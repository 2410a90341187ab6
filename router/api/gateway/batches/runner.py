"""Runs batches in a router process: each has one process at a time, which another one follows when it is killed."""

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
from prometheus_client import CollectorRegistry, Counter, Gauge
from starlette.types import ASGIApp

from router.api.gateway.batches.records import ENDED, Batch, Claim, Fault, Record, Status
from router.api.gateway.batches.store import BatchStore, is_of_disk
from router.api.gateway.responses.store import StoreError
from router.batches.journal import Journal
from router.batches.lines import LineReader, Problem, summary_of
from router.batches.run import BatchRun, Later, PassEnd
from router.batches.sending import Sender
from router.security.identity import Identity, set_caller

log = logging.getLogger("octavo.router.batches")

MAX_LINES = 50_000
# With empty ones.
_MOST_READ = 20 * MAX_LINES
# The last priority of all: live requests come first, where priorities are in use (scheduling_policy).
_PRIORITY = 2**31 - 1
# How often a process looks for batches that another one has left, and for what happens to its own.
_POLL_S = 1.0
# Batches that a process runs at once; a tenant has one of them.
_MOST_RUNNING = 64
# How much of a store may fill up between two looks at it.
_RECHECKS = 64
_OUTPUT = "batch_output"
# A disk that is full, or gone: the batch waits for it.
_TROUBLE_S = 10.0
# Passes of a batch that may end unexpectedly, one after another; then it fails. Pauses between them: 1, 2, 4, 8 s.
_MOST_FAILED_PASSES = 5
# How long a line is tried at a time, while its server is full or it is refused: then other lines go first.
_PATIENCE_S = 60.0
# How long a line may be refused, while others are answered, before its last refusal is its answer.
_SETTLE_S = 600.0
# How often a process looks for what was never finished.
_SWEEP_S = 300.0


@dataclass(slots=True)
class _Pause:
    """Until when a batch of this process is left alone, while others have their turn. Times are the event loop's."""

    until: float = 0.0
    # When its last turn began it was over already. Otherwise it is looked at as soon as it is.
    was_over: bool = False
    # By time.time().
    expires_at: float = float("inf")
    later: Later = field(default_factory=lambda: Later(_SETTLE_S))


class _Metrics:
    """About the batches that this process runs."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.running = Gauge("octavo_batches", "Batches that this router process runs.", registry=registry)
        self.ended = Counter("octavo_batches_ended_total", "Batches that ended.", ["status"], registry=registry)
        self.lines = Counter(
            "octavo_batch_lines_total",
            "Lines of batches whose output was written, by outcome: `success`, `error`.",
            ["outcome"],
            registry=registry,
        )

    def note_line(self, is_success: bool) -> None:
        self.lines.labels("success" if is_success else "error").inc()


class Runner:
    def __init__(
        self,
        store: BatchStore,
        app: ASGIApp,
        identify: Callable[[str, str], Identity | None],
        registry: CollectorRegistry,
        *,
        concurrency: int,
        max_line_bytes: int,
    ) -> None:
        """app: computes requests, with the caller's identity set. identify: finds a tenant, by name and key digest.
        registry: for its metrics. concurrency: requests of all batches at once."""
        self._store, self._identify, self._max_line_bytes = store, identify, max_line_bytes
        self._metrics = _Metrics(registry)
        self._concurrency, self._slots = concurrency, asyncio.Semaphore(concurrency)
        transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False, client=("batches", 0))
        self._client = httpx2.AsyncClient(transport=transport, base_url="http://router", timeout=None)
        self._sender = Sender(self._client, patience=_PATIENCE_S, fatal=frozenset(), gate=self._slots)
        self._wake = asyncio.Event()
        # A batch of each tenant.
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # Batches that could not go on, by id.
        self._pauses: dict[str, _Pause] = {}
        self._sweeping_at = 0.0
        self._runs: set[BatchRun] = set()
        self._loop: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._loop = asyncio.create_task(self._look())

    def wake(self) -> None:
        """Looks for batches now."""
        self._wake.set()

    def leave(self) -> None:
        """Takes no more lines. What is being computed ends first; then another process may go on."""
        if self._loop is not None:
            self._loop.cancel()
        for run in self._runs:
            run.leave()

    async def stop(self) -> None:
        tasks = [*self._tasks.values(), *([] if self._loop is None else [self._loop])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()

    async def _look(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self._sweep()
                queue = await self._store.run(self._store.queue)
                known = {folder.name for _, folder in queue}
                self._pauses = {name: pause for name, pause in self._pauses.items() if name in known}
                for entry, folder in queue:
                    await self._begin(entry, folder)
            except StoreError as error:
                log.error("batches can't be read: %s", error)
            except Exception:
                log.exception("batches can't be looked at")
            with contextlib.suppress(TimeoutError):
                # Not wait_for, which loses a cancellation that comes together with what it waits for (Python 3.11).
                async with asyncio.timeout(_POLL_S):
                    await self._wake.wait()

    async def _sweep(self) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._sweeping_at:
            self._sweeping_at = now + _SWEEP_S
            await self._store.run(self._store.sweep)

    async def _begin(self, entry: Path, folder: Path) -> None:
        tenant, batch = folder.parent.parent.name, Batch(folder)
        if tenant in self._tasks or len(self._tasks) >= _MOST_RUNNING or await self._is_paused(batch):
            return
        claim = await self._store.run(Claim.take, entry)
        if claim is None:
            return
        task = self._tasks[tenant] = asyncio.create_task(self._hold(claim, batch))
        self._metrics.running.inc()
        task.add_done_callback(lambda _: self._end(tenant))

    async def _is_paused(self, batch: Batch) -> bool:
        pause = self._pauses.get(batch.folder.name)
        if pause is None or asyncio.get_running_loop().time() >= pause.until:
            return False
        return pause.was_over or not await self._is_over(batch, pause)

    async def _is_over(self, batch: Batch, pause: _Pause) -> bool:
        return time.time() >= pause.expires_at or await self._store.run(lambda: batch.cancelled_at) is not None

    def _end(self, tenant: str) -> None:
        del self._tasks[tenant]
        self._metrics.running.dec()
        # The tenant's next one may begin.
        self._wake.set()

    async def _hold(self, claim: Claim, batch: Batch) -> None:
        """Runs a batch until it ends, or lets others have their turn."""
        pause = self._pauses.setdefault(batch.folder.name, _Pause())
        try:
            seconds = _POLL_S
            try:
                pause.was_over = await self._is_over(batch, pause)
                if await self._go_on(claim, batch, pause.later):
                    self._pauses.pop(batch.folder.name, None)
                    return
            except Exception as error:
                if is_of_disk(error):
                    log.error("batch %s waits: %s", batch.folder.name, error)
                    seconds = _TROUBLE_S
                else:
                    log.exception("batch %s waits", batch.folder.name)
                    seconds = _POLL_S * 2 ** await self._note_failure(batch, error)
            await self._pause(claim, batch, pause, seconds)
        finally:
            claim.release()

    async def _pause(self, claim: Claim, batch: Batch, pause: _Pause, seconds: float) -> None:
        """Leaves a batch alone for a while, and puts it behind all others of its tenant, also if its record can't be
        read. One without a record keeps its place: that tells how long it has had none."""
        pause.until = asyncio.get_running_loop().time() + seconds
        try:
            record = await self._store.run(batch.read)
        except StoreError:
            pass
        else:
            if record is None:
                return
            pause.expires_at = record.expires_at
        with contextlib.suppress(StoreError):
            await self._store.run(claim.put_back)

    async def _note_failure(self, batch: Batch, error: Exception) -> int:
        """Counts a pass that ended unexpectedly, and ends the batch after too many. Returns how many came before it."""
        try:
            record = await self._store.run(batch.read)
            if record is None or record.status in ENDED:
                return 0
            record.num_failed_passes += 1
            if record.num_failed_passes >= _MOST_FAILED_PASSES:
                record.faults = [
                    *record.faults,
                    _fault(
                        "internal_error",
                        f"{record.num_failed_passes} tries to compute it ended unexpectedly, the last with "
                        f"{type(error).__name__}: {str(error)[:500]}; the log of the router has the cause",
                    ),
                ]
                # If even its files can't be made after as many tries, it ends without them.
                record.ends_as, record.num_failed_passes = "failed", 0
                record.become("failed" if record.status == "finalizing" else "finalizing")
            await self._store.run(batch.write, record)
            return max(record.num_failed_passes - 1, 0)
        except StoreError as trouble:
            log.error("batch %s waits: %s", batch.folder.name, trouble)
            return _MOST_FAILED_PASSES

    async def _go_on(self, claim: Claim, batch: Batch, later: Later) -> bool:
        """Runs a batch from the state in which it is. Returns whether it has ended; another turn goes on if not.

        Raises StoreError, JournalError, OSError.
        """
        run = self._store.run
        record = await run(batch.read)
        if record is None:
            if claim.is_stale:
                await run(claim.end)
                await run(batch.remove)
            return False
        if record.status == "validating":
            if await run(batch.why_over, record) == "cancelled":
                await self._finalize(batch, record, "cancelled")
            else:
                await self._validate(batch, record)
        if record.status == "in_progress":
            identity = self._identify(record.tenant, record.key_digest)
            if identity is None:
                await self._finalize(batch, record, "failed", _fault("no_key", "no API key of its tenant is left"))
            elif not await self._compute(batch, record, identity, later):
                return False
        if record.status == "finalizing":
            await run(_finish, self._store, batch, record)
        if record.status in ENDED:
            await run(batch.tidy)
            await run(claim.end)
            self._metrics.ended.labels(record.status).inc()
            log.info(
                "batch %s is %s: %d lines, %d answers, %d errors",
                record.id,
                record.status,
                record.num_lines,
                record.num_successes,
                record.num_failures,
            )
        return record.status in ENDED

    async def _validate(self, batch: Batch, record: Record) -> None:
        summary = await self._store.run(summary_of, batch.input, _MOST_READ)
        record.num_lines = summary.num_lines
        if not summary.is_whole or not 0 < summary.num_lines <= MAX_LINES:
            message = f"the file has {summary.num_lines} lines: use 1 to {MAX_LINES}"
            if not summary.is_whole:
                message = f"the file has more than {_MOST_READ} lines, with empty ones: use 1 to {MAX_LINES}"
            record.faults = [Fault("invalid_file", message, param="input_file_id")]
            record.become("failed")
        else:
            record.become("in_progress")
        await self._store.run(batch.write, record)

    async def _compute(self, batch: Batch, record: Record, identity: Identity, later: Later) -> bool:
        """Computes the lines that have no output yet. Returns False if some are left for another turn."""
        set_caller(dataclasses.replace(identity, least_priority=_PRIORITY))
        answers = await self._store.run(Journal, batch.answers, record.key)
        try:
            problems = await self._store.run(Journal, batch.problems, record.key)
        except BaseException:
            await answers.close()
            raise
        try:
            # Before any line: a pass may fail at once, each time.
            ending: Status | None = await self._store.run(batch.why_over, record)
            if ending is None:
                await self._store.run(self._store.check_disk)
                ending = await self._pass(batch, record, answers, problems, identity, later, None)
            if ending == "expired":
                refusal = Problem("batch_expired", f"it was not computed within {record.completion_window}")
                ending = await self._pass(batch, record, answers, problems, identity, later, refusal)
                if ending == "completed":
                    ending = "expired"
        finally:
            await answers.close()
            await problems.close()
        _count(record, answers, problems)
        if ending is None:
            await self._store.run(batch.write, record)
            return False
        if ending in ("completed", "expired"):
            num_there = answers.num_lines + problems.num_lines
            if num_there < record.num_lines:
                raise RuntimeError(f"{num_there} of {record.num_lines} lines have an output after the last pass")
        await self._finalize(batch, record, ending)
        return True

    async def _pass(
        self,
        batch: Batch,
        record: Record,
        answers: Journal,
        problems: Journal,
        identity: Identity,
        later: Later,
        refusal: Problem | None,
    ) -> Status | None:
        """Goes through the lines. refusal: given to each that has no output, instead of computing it. Returns how the
        batch ends; None: it does not end here."""
        with LineReader(batch.input, self._max_line_bytes, (record.endpoint,)) as reader:
            run = BatchRun(
                record.key,
                reader,
                answers,
                problems,
                self._sender.send,
                concurrency=self._concurrency,
                refusal=refusal,
                later=Later() if refusal else later,
                on_line=self._metrics.note_line,
                is_own=True,
            )
            task = asyncio.create_task(run.run())
            self._runs.add(run)
            try:
                ending = await self._watch(task, batch, record, answers, problems, identity, is_expired=bool(refusal))
                if ending is not None:
                    return ending
                return "completed" if task.result() is PassEnd.ALL_DONE else None
            finally:
                self._runs.discard(run)
                task.cancel()
                await asyncio.wait([task])

    async def _watch(
        self,
        task: asyncio.Task[PassEnd],
        batch: Batch,
        record: Record,
        answers: Journal,
        problems: Journal,
        identity: Identity,
        *,
        is_expired: bool,
    ) -> Status | None:
        """Follows a pass and shows how far it is. Returns why it ends early, or None once it is over."""
        checked_at = 0
        while True:
            await asyncio.wait([task], timeout=_POLL_S)
            if task.done():
                return None
            if _count(record, answers, problems):
                record.num_failed_passes = 0
                await self._store.run(batch.write, record)
            why_over = await self._store.run(batch.why_over, record)
            if why_over == "cancelled" or (why_over and not is_expired):
                return why_over
            written = answers.size + problems.size
            if written - checked_at > self._store.max_bytes // _RECHECKS:
                checked_at = written
                why = await self._store.run(self._store.why_full, record.tenant, identity.weight, 0)
                if why:
                    record.faults = [Fault("no_room", why)]
                    return "failed"

    async def _finalize(self, batch: Batch, record: Record, ending: Status, *faults: Fault) -> None:
        record.ends_as, record.faults = ending, [*record.faults, *faults]
        record.become("finalizing")
        await self._store.run(batch.write, record)


def _fault(code: str, message: str) -> Fault:
    return Fault(code, message)


def _count(record: Record, answers: Journal, problems: Journal) -> bool:
    """Takes over the counts. Returns whether they have changed."""
    before = record.num_successes, record.num_failures
    record.num_successes, record.num_failures = answers.num_lines, problems.num_lines
    return before != (record.num_successes, record.num_failures)


def _finish(store: BatchStore, batch: Batch, record: Record) -> None:
    """Makes files of the output. A process that is killed meanwhile has done a part; doing it again does the rest."""
    for path, file_id, name in (
        (batch.answers, record.answers_id, "output"),
        (batch.problems, record.problems_id, "error"),
    ):
        if path.exists() and not path.stat().st_size:
            path.unlink()
        if path.exists() or store.content(record.tenant, file_id).exists():
            store.add_file(record.tenant, file_id, path, f"{record.id}_{name}.jsonl", _OUTPUT)
    record.become(record.ends_as)
    batch.write(record)
