"""A Ray actor that runs one process of a cluster on the node where Ray placed it; the launcher calls it.

Calls carry only text and numbers. Secrets come with a call, never with the actor's creation, which Ray stores.
"""

import asyncio
import fcntl
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from octavo.cluster.errors import ProcessFailed
from octavo.cluster.ports import are_free
from octavo.cluster.processes import ProcessSpec, Stage, process_command
from octavo.cluster.readiness import read_health
from octavo.cluster.runtime_files import child_environment
from octavo.cluster.supervisor import Supervisor
from octavo.ray.library import import_ray

_PREFIX, _NEW_PREFIX = "octavo-ray-", "octavo-new-"
_LOCK = "lock"


class ProcessDirectory:
    """A directory of mode 0700, locked as long as this process lives. Ray ends actors without notice: the next actor on
    the machine removes what they left."""

    def __init__(self) -> None:
        remove_left_ones()
        new = Path(tempfile.mkdtemp(prefix=_NEW_PREFIX))
        self._lock = os.open(new / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Other actors can find it only from here on, locked.
        self.path = new.rename(new.with_name(new.name.replace(_NEW_PREFIX, _PREFIX)))

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_left_ones() -> None:
    """Removes directories that no live process holds. Those of other users cannot be opened and stay."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(lock)


# Stands for the directory in texts from the launcher, which does not know the path.
DIRECTORY = "{directory}"

# Below the ports that systems use for outgoing connections.
_PORTS = range(20_000, 32_000)
_MOST_NEWS = 1000


class ProcessHost:
    """Starts the process in its own process group, restarts it when it dies, and passes on its output. When this actor
    ends, for any reason, the process is killed: Ray starts another actor elsewhere."""

    def __init__(self, name: str, stage: int) -> None:
        """name: for people. stage: a value of octavo.cluster.processes.Stage."""
        self._name, self._stage = name, Stage(stage)
        self._directory = ProcessDirectory()
        self._news: asyncio.Queue[tuple[str, str]] = asyncio.Queue(_MOST_NEWS)
        self._supervisor: Supervisor | None = None
        self._health_at: tuple[str, int] = ("", 0)

    async def place(self, num_ports: int = 0, before: tuple[str, int] = ("", 0)) -> tuple[str, str, int]:
        """Returns this node, its address, and the first of `num_ports` free ports in a row. before: node and first port
        from last time; on the same node the same ports are taken again if they are free."""
        ray = import_ray()
        node: str = ray.get_runtime_context().get_node_id()
        host: str = ray.util.get_node_ip_address()
        port = before[1] if before[0] == node and are_free(host, before[1], num_ports) else 0
        return node, host, port or free_ports(host, num_ports)

    async def write(self, name: str, text: str) -> None:
        """Makes or replaces a file of the process, readable by its owner only."""
        path = self._directory.path / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.new")
        new.unlink(missing_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        new.rename(path)

    async def run(
        self,
        arguments: Sequence[str],
        options: str,
        files: Mapping[str, str],
        *,
        max_restarts: int,
        metrics_host: str,
        health_port: int,
        hang_timeout: float,
    ) -> str:
        """Keeps the process running. Returns once it has ended: an empty string if it was told to, else its last
        lines and why it is not restarted.

        options: as YAML. files: text by name, written beside the options.
        """
        for name, text in {**files, "options.yaml": options.replace(DIRECTORY, str(self._directory.path))}.items():
            await self.write(name, text)
        command = process_command(self._stage, self._directory.path / "options.yaml", *arguments)
        self._health_at = metrics_host, health_port
        self._supervisor = Supervisor(
            [ProcessSpec(name=self._name, stage=self._stage, command=command, health_port=health_port)],
            environment=child_environment(),
            max_restarts=max_restarts,
            metrics_host=metrics_host,
            hang_timeout=hang_timeout,
            on_line=lambda _, text: self._tell("line", text),
            on_event=lambda _, text: self._tell("event", text),
            death_signal=signal.SIGKILL,
        )
        try:
            await self._supervisor.run()
        except ProcessFailed as error:
            return str(error)
        return ""

    async def news(self) -> list[tuple[str, str]]:
        """Waits for news and returns all since the last call: ("line", text that the process wrote) and ("event", what
        happened to it)."""
        news = [await self._news.get()]
        while not self._news.empty():
            news.append(self._news.get_nowait())
        return news

    async def health(self) -> tuple[bool, str] | None:
        """As octavo.cluster.readiness.read_health."""
        host, port = self._health_at
        return await read_health(host, port) if port else None

    async def stop(self, grace: float) -> None:
        """Ends the process: SIGTERM, then SIGKILL after `grace` seconds."""
        if self._supervisor is not None:
            await self._supervisor.stop({self._stage: grace})

    async def clean_up(self) -> None:
        """Removes the process's files."""
        self._directory.remove()

    def _tell(self, kind: str, text: str) -> None:
        if self._news.full():
            # Nobody has read for long; the latest news matters most.
            self._news.get_nowait()
        self._news.put_nowait((kind, text))


def free_ports(host: str, count: int) -> int:
    """The first of `count` free ports in a row; 0 if count is 0."""
    while count:
        first = random.choice(_PORTS)
        if are_free(host, first, count):
            return first
    return 0
