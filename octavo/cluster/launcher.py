"""Runs `octavo up`: starts a cluster, follows it, and stops it."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

from rich.console import Console

from configs.options import Options
from octavo.cluster.display import Display
from octavo.cluster.ports import claimed_ports, resolve_ports
from octavo.cluster.processes import ProcessSpec, Stage, cluster_processes
from octavo.cluster.quarantine import quarantine_of
from octavo.cluster.readiness import read_health, router_targets
from octavo.cluster.runtime_files import child_environment, locked_runtime_dir, write_options
from octavo.cluster.supervisor import Supervisor
from runtime.process import raise_open_files
from runtime.telemetry.quarantine import QuarantineNote, text_of, write_notes

# Seconds that a drained scheduler or worker needs to end.
_STOP_GRACE = 10.0
_HEALTH_INTERVAL = 0.5
FORCED_EXIT = 130


# What a cluster is started for, if not for clients: called once it is ready.
Work = Callable[[], Awaitable[None]]


def run_cluster(
    options: Options,
    *,
    console: Console,
    first_prompt: str = "",
    work: Work | None = None,
    verbose: bool = False,
) -> int:
    """Starts the cluster and serves until SIGINT or SIGTERM, which drain it; a second signal ends it at once.

    first_prompt: a chat message that is answered, token by token, once the cluster is ready. work: the cluster ends
    when it has; its errors are raised.
    Returns the exit code: 0 after an orderly end. Raises ClusterError, and ProcessFailed with the cause if a process
    ends and is not restarted.
    """
    raise_open_files()
    with locked_runtime_dir(options.runtime_dir) as directory:
        options = resolve_ports(options)
        with claimed_ports(options):
            config = write_options(options, directory)
            specs = cluster_processes(options, config, num_cores=len(os.sched_getaffinity(0)))
            display = Display(specs, console, verbose=verbose)
            return asyncio.run(
                Launcher(options, console, first_prompt, display, _LocalFleet(options, specs, display), work).run()
            )


class Fleet(Protocol):
    """The processes of a cluster."""

    # Set once the first processes have been told to start.
    first_wave_begun: asyncio.Event

    async def run(self) -> None:
        """Starts all and keeps them running until `stop` has ended them. Raises ProcessFailed if one of them ends, is
        not restarted, and the others cannot go on without it; they have been stopped by then."""
        ...

    def note_serving(self) -> None:
        """Notes that the routers serve: from now on a replica that fails for good does not end the others."""
        ...

    async def watch(self) -> None:
        """Shows the processes' progress until cancelled."""
        ...

    async def stop(self, grace: Mapping[Stage, float]) -> None:
        """Ends all, stage after stage. grace: seconds for each stage (5 by default)."""
        ...

    def kill(self) -> None:
        """Ends all at once."""
        ...


class _LocalFleet(Supervisor):
    """The processes on this machine."""

    def __init__(self, options: Options, specs: list[ProcessSpec], display: Display):
        super().__init__(
            specs,
            environment=child_environment(),
            max_restarts=options.max_restarts,
            metrics_host=options.metrics_host,
            hang_timeout=options.hang_timeout,
            on_line=display.line,
            on_event=display.event,
            quarantine=quarantine_of(options, specs, partial(_tell_routers, options.runtime_dir)),
        )
        self._display = display
        self._health_host = options.metrics_host

    async def watch(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for each in self.processes:
                tasks.create_task(self._show_health(each.spec))

    async def _show_health(self, spec: ProcessSpec) -> None:
        while spec.health_port:
            health = await read_health(self._health_host, spec.health_port)
            if health is not None:
                well, text = health
                self._display.state(spec, text, well)
            await asyncio.sleep(_HEALTH_INTERVAL)


def _tell_routers(directory: Path, notes: Mapping[int, QuarantineNote]) -> None:
    # A full disk is no reason to end.
    with contextlib.suppress(OSError):
        write_notes(directory, text_of(notes))


class Launcher:
    """Shows a cluster as it starts, and stops it on a signal."""

    def __init__(
        self,
        options: Options,
        console: Console,
        first_prompt: str,
        display: Display,
        fleet: Fleet,
        work: Work | None = None,
    ):
        self._work = work
        self._options = options
        self._console = console
        self._first_prompt = first_prompt
        self._targets = router_targets(options)
        self._display = display
        self._fleet = fleet
        self._stop = asyncio.Event()
        self._forced = False

    async def run(self) -> int:
        """Serves until SIGINT or SIGTERM; result and errors as in run_cluster."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        serving = asyncio.create_task(self._fleet.run())
        stop = asyncio.create_task(self._stop.wait())
        greeting = asyncio.create_task(self._greet())
        try:
            while not stop.done() and not serving.done():
                waiting = {serving, stop} | ({greeting} if not greeting.done() else set())
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if greeting.done():
                    greeting.result()
        finally:
            await _cancel(greeting)
            await _cancel(stop)
            self._display.loaded()
            if not serving.done():
                await self._drain()
        await serving
        return FORCED_EXIT if self._forced else 0

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._forced = True
            self._fleet.kill()
        self._stop.set()

    async def _drain(self) -> None:
        self._console.print("Stopping: running requests may finish; Ctrl-C again ends them.")
        grace = {Stage.ROUTER: self._options.drain_timeout + _STOP_GRACE}
        await self._fleet.stop({Stage.SCHEDULER: _STOP_GRACE, Stage.WORKER: _STOP_GRACE} | grace)

    async def _greet(self) -> None:
        """Follows the loading, then prints how to call the cluster."""
        await self._fleet.first_wave_begun.wait()
        # Importing gRPC and the client takes 0.1 s of CPU: do it while the processes load, not before they start.
        from octavo.cluster.serving import wait_until_healthy, wait_until_serving
        from octavo.cluster.welcome import first_completion, how_to_call, is_guarded

        watching = asyncio.create_task(self._fleet.watch())
        try:
            if self._options.tls_cert_file:
                await wait_until_healthy(self._options)
            else:
                await wait_until_serving(*self._targets)
        finally:
            await _cancel(watching)
        self._fleet.note_serving()
        self._display.loaded()
        self._console.print(f"Ready in {self._display.elapsed:.1f} s.", highlight=False)
        if self._work is not None:
            await self._work()
            self._stop.set()
            return
        if self._first_prompt and not is_guarded(self._options):
            with self._display.holding():
                await first_completion(self._targets, self._first_prompt, self._console)
        self._console.print(how_to_call(self._options), highlight=False, markup=False, soft_wrap=True)
        self._console.print("serving; Ctrl-C to stop", style="bold green")


async def _cancel(task: asyncio.Task) -> None:
    """Cancels a task and waits until it has ended. Its outcome is left to those who await it."""
    task.cancel()
    await asyncio.wait([task])
