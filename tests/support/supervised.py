"""A supervisor with one small process, whose health a test sets."""

import asyncio
import signal
import sys
from pathlib import Path

from octavo.cluster.processes import ProcessSpec, Stage
from octavo.cluster.supervisor import Supervisor
from tests.support.ports import free_port
from tests.support.repository import ROOT
from tests.support.up import environment

TIMEOUT = 60.0
HANG_TIMEOUT = 1.0


# Its /health shows the content of a file: "well" or "loading"; "silent": it has no /health. It makes progress unless
# it loads; SIGUSR2 lets it hold the interpreter's lock for ever.
PROGRAM = """
import ctypes, signal, sys, threading
from pathlib import Path
from prometheus_client import CollectorRegistry
from runtime.progress.page import ProgressPage
from runtime.progress.watchdog import Watchdog
from runtime.telemetry.http_server import ObservabilityServer

state = Path(sys.argv[2])

def health():
    text = state.read_text()
    print("asked:", text, flush=True)
    return text == "well", text

def hold_the_lock(*_):
    ctypes.PyDLL(None).usleep(2**32 - 1)

signal.signal(signal.SIGUSR2, hold_the_lock)
if state.read_text() != "loading":
    Watchdog(page=ProgressPage.inherited()).start()
server = ObservabilityServer("127.0.0.1", int(sys.argv[1]), CollectorRegistry(), health)
if state.read_text() != "silent":
    server.start()
print("started", flush=True)
while True:
    signal.pause()
"""


class Supervised:
    """A supervisor with one process; keeps what the supervisor reports and what the process prints."""

    def __init__(
        self, directory: Path, stage: Stage = Stage.WORKER, *, state: str = "well", hang_timeout: float = HANG_TIMEOUT
    ) -> None:
        self.state = directory / "state"
        self.state.write_text(state)
        port = free_port()
        self.lines: list[str] = []
        self.events: list[str] = []
        self._changed = asyncio.Condition()
        spec = ProcessSpec(
            name="it",
            stage=stage,
            command=(sys.executable, "-c", PROGRAM, str(port), str(self.state)),
            health_port=port,
        )
        self.supervisor = Supervisor(
            [spec],
            environment=environment(PYTHONPATH=str(ROOT)),
            max_restarts=5,
            metrics_host="127.0.0.1",
            hang_timeout=hang_timeout,
            on_line=lambda spec, line: self._note(self.lines, line),
            on_event=lambda spec, text: self._note(self.events, text),
        )

    async def __aenter__(self) -> "Supervised":
        self._running = asyncio.create_task(self.supervisor.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.supervisor.kill()
        await self._running

    def _note(self, log: list[str], text: str) -> None:
        log.append(text)
        asyncio.get_running_loop().create_task(self._notify())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def wait_for(self, log: list[str], words: str, count: int = 1) -> None:
        async with asyncio.timeout(TIMEOUT), self._changed:
            await self._changed.wait_for(lambda: sum(words in text for text in log) >= count)

    async def wait_until_served(self) -> None:
        async with asyncio.timeout(TIMEOUT):
            while not self.supervisor.processes[0].has_served:  # noqa: ASYNC110 (nothing tells it)
                await asyncio.sleep(0.01)

    def signal(self, number: signal.Signals) -> None:
        self.supervisor.processes[0].send_signal(number)
