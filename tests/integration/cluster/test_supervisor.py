"""`octavo up` and processes that die, hang, or only look so. Small processes, real signals."""

import asyncio
import contextlib
import resource
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from octavo.cluster.errors import ProcessFailed
from octavo.cluster.processes import ProcessSpec, Stage, Unit
from octavo.cluster.quarantine import Quarantine
from octavo.cluster.supervisor import Supervisor
from tests.support.supervised import HANG_TIMEOUT, TIMEOUT, Supervised
from tests.support.up import environment


async def test_a_stopped_process_is_killed_and_started_again(tmp_path: Path):
    async with Supervised(tmp_path) as it:
        await it.wait_until_served()
        it.signal(signal.SIGSTOP)
        await it.wait_for(it.events, "it hangs and is killed")
        await it.wait_for(it.events, "was killed by SIGKILL; starting it again")
        await it.wait_for(it.lines, "started", 2)


async def test_a_process_whose_interpreter_is_stuck_prints_its_stacks_and_is_killed(tmp_path: Path):
    async with Supervised(tmp_path) as it:
        await it.wait_until_served()
        it.signal(signal.SIGUSR2)
        await it.wait_for(it.lines, "in hold_the_lock")
        await it.wait_for(it.events, "was killed by SIGKILL; starting it again")


async def test_a_process_that_is_stopped_for_less_is_left_alone(tmp_path: Path):
    async with Supervised(tmp_path, hang_timeout=3.0) as it:
        await it.wait_until_served()
        it.signal(signal.SIGSTOP)
        await asyncio.sleep(1.2)
        it.signal(signal.SIGCONT)
        await asyncio.sleep(0.7)
        assert not it.events


async def test_a_process_that_starts_may_stand_still(tmp_path: Path):
    # Loading may hold the interpreter lock for a long time.
    async with Supervised(tmp_path, state="loading") as it:
        await it.wait_for(it.lines, "asked: loading")
        it.signal(signal.SIGSTOP)
        await asyncio.sleep(1.5 * HANG_TIMEOUT)
        assert not it.events


async def test_the_supervisors_own_pause_is_no_fault_of_others(tmp_path: Path):
    async with Supervised(tmp_path) as it:
        await it.wait_until_served()
        # Neither makes progress meanwhile; this one wakes up first.
        it.signal(signal.SIGSTOP)
        time.sleep(2 * HANG_TIMEOUT)  # noqa: ASYNC251 (the loop has to stand still)
        await asyncio.sleep(0)
        it.signal(signal.SIGCONT)
        await asyncio.sleep(1.5 * HANG_TIMEOUT)
        assert not it.events


async def test_a_silent_health_is_no_reason_to_kill(tmp_path: Path):
    async with Supervised(tmp_path, state="silent") as it:
        await it.wait_for(it.lines, "started")
        await asyncio.sleep(1.5 * HANG_TIMEOUT)
        assert it.lines == ["started"]
        assert not it.events


async def test_without_descriptors_a_start_is_tried_again_and_the_others_run_on(tmp_path: Path):
    # `octavo up` used to end with OSError, and all processes with it.
    async with Supervised(tmp_path) as it:
        await it.wait_until_served()
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            it.signal(signal.SIGKILL)
            await it.wait_for(it.events, "cannot be started again ([Errno 24] Too many open files)")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        await it.wait_for(it.lines, "started", 2)


@pytest.mark.parametrize("stage", Stage)
async def test_what_had_served_is_started_again_at_once_however_often_it_is_killed(tmp_path: Path, stage: Stage):
    async with Supervised(tmp_path, stage) as it:
        for count in (1, 2, 3):
            await it.wait_for(it.lines, "started", count)
            await it.wait_until_served()
            it.signal(signal.SIGKILL)
            await it.wait_for(it.events, "was killed by SIGKILL; starting it again", count)
        assert set(it.events) == {"was killed by SIGKILL; starting it again"}


async def test_what_has_not_served_is_started_again_ever_later(tmp_path: Path):
    async with Supervised(tmp_path, state="loading") as it:
        for count in (1, 2):
            await it.wait_for(it.lines, "started", count)
            it.signal(signal.SIGKILL)
        await it.wait_for(it.events, "starting it again in 1 s")
        assert len(it.events) == 2


@contextlib.asynccontextmanager
async def _replicas(
    *ends: str, is_well: bool = True, no_replica_timeout: float = 300.0
) -> AsyncIterator[tuple[Supervisor, asyncio.Task[None], list[str]]]:
    """Replicas that each have a worker, which runs a shell command, and a scheduler, which lives until it is told to
    end. None serves if not `is_well`. Yields the supervisor, its task, and the events."""
    events: list[str] = []
    specs = [
        ProcessSpec(
            name=f"{stage.name.lower()} {replica}",
            stage=stage,
            command=("/bin/sh", "-c", end if stage is Stage.WORKER else "exec sleep 600"),
            unit=Unit(f"replica {replica}", (replica,)),
        )
        for replica, end in enumerate(ends)
        for stage in (Stage.WORKER, Stage.SCHEDULER)
    ]
    units = {spec.unit for spec in specs if spec.unit is not None}
    quarantine = Quarantine(units, no_replica_timeout=no_replica_timeout, max_quarantine=0.05)
    for unit in units if is_well else ():
        quarantine.note_health(unit, True, 0.0)
    supervisor = Supervisor(
        specs,
        environment=environment(),
        max_restarts=1,
        metrics_host="127.0.0.1",
        hang_timeout=HANG_TIMEOUT,
        on_line=lambda spec, line: None,
        on_event=lambda spec, text: events.append(f"{spec.name} {text}"),
        quarantine=quarantine,
    )
    running = asyncio.create_task(supervisor.run())
    async with asyncio.timeout(TIMEOUT):
        await supervisor.first_wave_begun.wait()
        try:
            yield supervisor, running, events
        finally:
            await supervisor.stop({})
            await asyncio.gather(running, return_exceptions=True)


async def _until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - nothing tells it
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        ("echo no memory; exit 1", "(max_restarts=1).\nreplica 1 is in quarantine"),
        ("echo no memory; exit 2", "ended with exit code 2. Its last words:\n  no memory\nreplica 1 is in quarantine"),
    ],
)
async def test_a_replica_that_fails_again_and_again_is_stopped_alone_and_tried_again(end: str, cause: str):
    async with _replicas("exec sleep 600", end) as (supervisor, running, events):
        processes = {each.spec.name: each.process for each in supervisor.processes}
        other = processes["scheduler 1"]
        assert other is not None
        await _until(lambda: sum(cause in event for event in events) >= 2)
        assert await other.wait() == -signal.SIGTERM, "it was stopped along with its worker"
        assert any(event == "worker 1 is started again after a quarantine, with all of replica 1" for event in events)
        for name in ("worker 0", "scheduler 0"):
            process = processes[name]
            assert process is not None
            assert process.returncode is None
        assert not any("scheduler" in event.partition(" ")[0] for event in events), "its end was no failure"
        assert not running.done()


async def test_without_any_replica_that_has_served_a_failure_ends_all():
    async with _replicas("exec sleep 600", "echo no memory; exit 2", is_well=False) as (supervisor, running, _):
        with pytest.raises(ProcessFailed, match="no memory"):
            await running
        assert not any(each.is_running for each in supervisor.processes)


async def test_without_a_replica_for_too_long_all_ends_with_the_last_cause():
    async with _replicas("exit 2", "echo no memory; exit 2", no_replica_timeout=0.5) as (supervisor, running, events):
        with pytest.raises(ProcessFailed, match=r"(?s)exit code 2.*No replica has been left for"):
            await running
        assert not any(each.is_running for each in supervisor.processes)
        assert sum("is in quarantine" in event for event in events) >= 2


async def test_a_later_wave_waits_and_is_not_started_any_more_once_all_is_stopped(tmp_path: Path):
    lines: list[str] = []
    specs = [
        ProcessSpec(name=str(wave), stage=Stage.WORKER, command=("/bin/sleep", "600"), wave=wave)
        for wave in (0, 1_000_000)
    ]
    supervisor = Supervisor(
        specs,
        environment=environment(),
        max_restarts=0,
        metrics_host="127.0.0.1",
        hang_timeout=HANG_TIMEOUT,
        on_line=lambda spec, line: lines.append(line),
        on_event=lambda spec, text: lines.append(text),
    )
    running = asyncio.create_task(supervisor.run())
    async with asyncio.timeout(TIMEOUT):
        await supervisor.first_wave_begun.wait()
        assert [each.process is not None for each in supervisor.processes] == [True, False]
        await supervisor.stop({})
        await running
    assert supervisor.processes[1].process is None
    assert not lines
