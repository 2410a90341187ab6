"""Keeps a cluster's processes running: replaces those that die or hang, gives up on hopeless ones, ends all."""

import asyncio
import collections
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.cluster.errors import ProcessFailed
from octavo.cluster.processes import ProcessSpec, Stage, Unit
from octavo.cluster.quarantine import RESTART_WINDOW, Quarantine, quarantine_text, released_text
from octavo.cluster.readiness import read_health
from runtime.awake_time import AwakeTime
from runtime.progress.page import ProgressPage
from runtime.progress.watchdog import EXIT_HUNG, STACKS_SIGNAL


class Standstill:
    """Follows the page of one process. A process that starts does not stand still, however long it takes."""

    def __init__(self, page: ProgressPage, awake: AwakeTime) -> None:
        """awake: knows when the supervisor itself stood still and could not see progress."""
        self._page, self._awake = page, awake
        self._count, self._since = 0, 0.0

    def seconds(self, now: float) -> float:
        """Seconds without progress. now: on time.monotonic()."""
        if (count := self._page.count) != self._count:
            self._count, self._since = count, now
        return self._awake.seconds(self._since, now) if count else 0.0


# The exit code of a process that would fail again in the same way: a bad option, a missing model, a corrupt file.
PERMANENT_FAILURE = 2
MAX_RESTART_DELAY = 32.0
# Seconds between two looks at /health, until the process serves.
_HEALTH_INTERVAL = 0.25
# Seconds between two looks at the progress of all processes; less if hang_timeout is short.
_PROGRESS_INTERVAL = 1.0
# Time for a hung process to print its stacks, and for the kernel to end it after SIGKILL.
_STACKS_S = 0.2
_KILL_S = 10.0
# Seconds between attempts to start a process when the system refuses to.
_START_INTERVAL = 1.0
# By then, schedulers and routers have finished importing, and half of their cores' time is free.
_WAVE_INTERVAL = 1.0
_CHILD = Path(__file__).with_name("child.py")
_LAST_LINES = 20
_LONGEST_LINE = 64 * 1024


class ManagedProcess:
    """A place in the cluster, held by one process after another."""

    def __init__(self, spec: ProcessSpec):
        self.spec = spec
        self.process: asyncio.subprocess.Process | None = None
        # None: no process runs, or it is already being killed.
        self.standstill: Standstill | None = None
        self.last_lines: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
        # The current or last process has reported by /health that it is well.
        self.has_served = False
        self._restarts: collections.deque[float] = collections.deque()
        # Restarts in a row since a process last served.
        self._num_in_vain = 0

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.returncode is None

    @property
    def num_recent_restarts(self) -> int:
        return len(self._restarts)

    def begin_anew(self) -> None:
        """Forgets earlier processes: its unit was stopped as a whole."""
        self.has_served = False
        self._restarts.clear()
        self._num_in_vain = 0

    def note_restart(self, now: float) -> None:
        self.forget_old_restarts(now)
        self._restarts.append(now)
        self._num_in_vain = 1 if self.has_served else self._num_in_vain + 1

    def forget_old_restarts(self, now: float) -> None:
        while self._restarts and now - self._restarts[0] > RESTART_WINDOW:
            self._restarts.popleft()

    @property
    def restart_delay(self) -> float:
        """Seconds until the restart: 0 after the first death, and after the death of a process that had served, because
        streams wait for it. Otherwise 1, 2, 4 and so on."""
        count = 0 if self.has_served else min(self._num_in_vain, self.num_recent_restarts)
        return min(2.0 ** (count - 1), MAX_RESTART_DELAY) if count else 0.0

    def send_signal(self, number: signal.Signals) -> None:
        if self.is_running:
            assert self.process is not None
            self.process.send_signal(number)


class Supervisor:
    """Restarts processes that die, and kills those that hang.

    metrics_host: the host of their /health. hang_timeout: seconds without progress after which a process is killed.
    on_line: called with each line that a process writes. on_event: called with each event of a process, as text for
    people. death_signal: sent to the processes if this one ends before them, for any reason. quarantine: takes the
    units that fail again and again; None: they end all others.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        *,
        environment: Mapping[str, str],
        max_restarts: int,
        metrics_host: str,
        hang_timeout: float,
        on_line: Callable[[ProcessSpec, str], None],
        on_event: Callable[[ProcessSpec, str], None],
        death_signal: signal.Signals = signal.SIGTERM,
        quarantine: Quarantine | None = None,
    ):
        self._quarantine = quarantine
        self.processes = [ManagedProcess(spec) for spec in specs]
        self._environment = dict(environment)
        self._max_restarts = max_restarts
        self._metrics_host, self._hang_timeout = metrics_host, hang_timeout
        self._progress_interval = min(_PROGRESS_INTERVAL, hang_timeout / 10)
        # Knows when this process stood still, which is no fault of the others.
        self._awake = AwakeTime(self._progress_interval)
        # Kills and quarantines under way.
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_line = on_line
        self._on_event = on_event
        self._death_signal = death_signal
        self._stopping = asyncio.Event()
        self.first_wave_begun = asyncio.Event()

    async def run(self) -> None:
        """Starts all processes and keeps them running until `stop` has ended them.

        Raises ProcessFailed if one of them ends, is not restarted, and the others cannot go on without it; they have
        been stopped by then.
        """
        tasks = [asyncio.create_task(self._keep_running(each)) for each in self.processes]
        watching = asyncio.create_task(self._watch_progress())
        done, _ = await asyncio.wait((*tasks, watching), return_when=asyncio.FIRST_EXCEPTION)
        try:
            for task in done:
                task.result()
        except ProcessFailed:
            await self.stop({})
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        finally:
            watching.cancel()

    async def stop(self, grace: Mapping[Stage, float]) -> None:
        """Ends all processes, stage after stage: SIGTERM, and SIGKILL after the stage's grace (5 s by default)."""
        self._stopping.set()
        await self._end(self.processes, grace)

    async def _end(self, processes: Sequence[ManagedProcess], grace: Mapping[Stage, float]) -> None:
        for stage in Stage:
            members = [each for each in processes if each.spec.stage is stage and each.is_running]
            for each in members:
                each.send_signal(signal.SIGTERM)
            waits = [asyncio.create_task(each.process.wait()) for each in members if each.process]
            if not waits:
                continue
            _, late = await asyncio.wait(waits, timeout=grace.get(stage, 5.0))
            if late:
                for each in members:
                    if each.is_running:
                        self._on_event(each.spec, "did not end in time and is killed")
                        each.send_signal(signal.SIGKILL)
                await asyncio.wait(late)

    def kill(self) -> None:
        """Ends all processes at once."""
        self._stopping.set()
        for each in self.processes:
            each.send_signal(signal.SIGKILL)

    async def _keep_running(self, each: ManagedProcess) -> None:
        await self._pause(each.spec.wave * _WAVE_INTERVAL)
        while await self._may_run(each):
            try:
                code = await self._run_once(each)
            except OSError as error:
                # No descriptors, processes or memory are left, but there may be some again. The first start tells at
                # once.
                if each.process is None:
                    raise
                self._on_event(each.spec, f"cannot be started again ({error}); trying again in {_START_INTERVAL:g} s")
                await self._pause(_START_INTERVAL)
                continue
            if self._stopping.is_set() or self._is_shut(each):
                continue
            now = time.monotonic()
            each.forget_old_restarts(now)
            if code == PERMANENT_FAILURE:
                self._give_up(each, self._obituary(each, code), now)
                continue
            if each.num_recent_restarts >= self._max_restarts:
                self._give_up(
                    each,
                    f"{self._obituary(each, code)}\nIt was started again {each.num_recent_restarts} times within "
                    f"{RESTART_WINDOW:g} s (max_restarts={self._max_restarts}).",
                    now,
                )
                continue
            if self._quarantine is not None:
                self._quarantine.note_death(each.spec.unit, now)
            delay = each.restart_delay
            each.note_restart(now)
            again = f"starting it again in {delay:g} s" if delay else "starting it again"
            self._on_event(each.spec, f"{_describe_exit(code)}; {again}")
            await self._pause(delay)

    def note_serving(self) -> None:
        """Notes that a router serves."""
        if self._quarantine is not None:
            self._quarantine.note_serving()

    # --- Quarantine

    async def _may_run(self, each: ManagedProcess) -> bool:
        """Waits while its unit is in quarantine. Returns False once `stop` has been called."""
        if self._is_shut(each):
            assert self._quarantine is not None
            assert each.spec.unit is not None
            waits = [self._quarantine.released(each.spec.unit), self._stopping.wait()]
            tasks = [asyncio.ensure_future(wait) for wait in waits]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
        return not self._stopping.is_set()

    def _is_shut(self, each: ManagedProcess) -> bool:
        return self._quarantine is not None and self._quarantine.is_in(each.spec.unit)

    def _give_up(self, each: ManagedProcess, cause: str, now: float) -> None:
        """Puts a process's unit in quarantine. Raises ProcessFailed if the cluster ends instead."""
        unit = each.spec.unit
        if self._quarantine is None or unit is None:
            raise ProcessFailed(cause)
        seconds = self._quarantine.put(unit, cause, now)
        self._on_event(each.spec, quarantine_text(each.spec, cause, seconds))
        self._begin(self._shut(each, unit, seconds))

    async def _shut(self, failed: ManagedProcess, unit: Unit, seconds: float) -> None:
        assert self._quarantine is not None
        members = [each for each in self.processes if each.spec.unit == unit]
        over = asyncio.ensure_future(self._pause(seconds))
        await self._end(members, {})
        await over
        if self._stopping.is_set():
            return
        for each in members:
            each.begin_anew()
        self._on_event(failed.spec, released_text(unit))
        self._quarantine.release(unit, time.monotonic())

    def _note_health(self, now: float) -> None:
        """Notes which units are well."""
        if self._quarantine is None:
            return
        for unit in {each.spec.unit for each in self.processes}:
            members = [each for each in self.processes if each.spec.unit == unit]
            if unit is not None and all(each.is_running for each in members):
                have_served = [each.has_served for each in members if each.spec.health_port]
                self._quarantine.note_health(unit, all(have_served) if have_served else None, now)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pause(self, seconds: float) -> None:
        """Sleeps, at most until `stop` is called."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    async def _run_once(self, each: ManagedProcess) -> int:
        """Runs one process and returns its exit code, negative for a signal."""
        each.last_lines.clear()
        each.has_served = False
        page = ProgressPage.create()
        try:
            process = each.process = await self._start(each, page)
        except OSError:
            page.close()
            raise
        each.standstill = Standstill(page, self._awake)
        if all(other.process is not None for other in self.processes if other.spec.wave == 0):
            self.first_wave_begun.set()
        if self._stopping.is_set() or self._is_shut(each):
            # `stop` ran before this process existed, or its unit was stopped.
            process.kill()
        reading = asyncio.create_task(self._read_lines(each, process))
        watching = asyncio.create_task(self._watch_service(each))
        # It is really gone: what replaces it is the only one.
        code = await process.wait()
        watching.cancel()
        each.standstill = None
        page.close()
        # A grandchild may hold the pipe open; the last lines are already there.
        await asyncio.wait([reading], timeout=1.0)
        reading.cancel()
        return code

    async def _start(self, each: ManagedProcess, page: ProgressPage) -> asyncio.subprocess.Process:
        """Raises OSError."""
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(_CHILD), str(os.getpid()), str(int(self._death_signal))),
            *each.spec.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            # Outside the terminal's process group: Ctrl-C reaches only the launcher, which ends them in order.
            start_new_session=True,
            env=self._environment | page.environment,
            pass_fds=(page.descriptor,),
        )

    async def _watch_service(self, each: ManagedProcess) -> None:
        """Notes when a process serves, and with it perhaps its unit."""
        while each.spec.health_port and not each.has_served:
            await asyncio.sleep(_HEALTH_INTERVAL)
            health = await read_health(self._metrics_host, each.spec.health_port)
            each.has_served = health is not None and health[0]
            if each.has_served:
                self._note_health(time.monotonic())

    async def _watch_progress(self) -> None:
        """Kills processes that make no progress: they are stopped, or stuck where Python cannot run. Raises
        ProcessFailed if no replica has been left for too long."""
        while not self._stopping.is_set():
            self._awake.wake(now := time.monotonic())
            for each in self.processes:
                if each.standstill and (seconds := each.standstill.seconds(now)) > self._hang_timeout:
                    each.standstill = None
                    self._on_event(each.spec, f"has made no progress for {seconds:.0f} s: it hangs and is killed")
                    self._begin(self._kill_hung(each))
            self._note_health(now)
            if self._quarantine is not None and (since := self._quarantine.none_since) is not None:
                self._quarantine.check(self._awake.seconds(since, now))
            await self._pause(self._progress_interval)

    async def _kill_hung(self, each: ManagedProcess) -> None:
        process = each.process
        assert process is not None
        each.send_signal(STACKS_SIGNAL)
        await asyncio.sleep(_STACKS_S)
        if process.returncode is None:
            process.kill()
        try:
            async with asyncio.timeout(_KILL_S):
                await process.wait()
        except TimeoutError:
            self._on_event(each.spec, f"has not ended {_KILL_S:g} s after SIGKILL: nothing replaces it until it has")

    async def _read_lines(self, each: ManagedProcess, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in _lines(process.stdout):
            each.last_lines.append(line)
            self._on_line(each.spec, line)

    def _obituary(self, each: ManagedProcess, code: int) -> str:
        words = "\n".join(f"  {line}" for line in each.last_lines) or "  (it wrote nothing)"
        return f"{each.spec.name} {_describe_exit(code)}. Its last words:\n{words}"


def _describe_exit(code: int) -> str:
    if code == EXIT_HUNG:
        return "has ended itself because it hung"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[str]:
    """Yields lines without line ends; a line longer than 64 KiB comes in pieces."""
    rest = b""
    while chunk := await reader.read(_LONGEST_LINE):
        *whole, rest = (rest + chunk).split(b"\n")
        if len(rest) > _LONGEST_LINE:
            whole, rest = [*whole, rest], b""
        for line in whole:
            yield line.decode(errors="replace").rstrip("\r")
    if rest:
        yield rest.decode(errors="replace")
