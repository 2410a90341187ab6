"""The containers of one Compose project, through the commands of docker or podman."""

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

_COMMAND_TIMEOUT_S = 600.0
_POLL_S = 0.2


class CommandError(Exception):
    """A command of the engine failed; the message has its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The engine's report on a container. num_restarts: by its restart policy."""

    is_running: bool
    exit_code: int
    num_restarts: int
    restart_policy: str


class Project:
    """Services of docker-compose.yml under a project name of their own."""

    def __init__(self, engine: str, compose: Sequence[str], name: str, files: Sequence[Path], scratch: Path) -> None:
        """engine: `docker` or `podman`. compose: the command that reads the files. scratch: a folder for one more."""
        self._engine, self._name = engine, name
        names: dict[str, None] = {}
        for file in files:
            names |= dict.fromkeys(yaml.safe_load(file.read_text())["services"])
        # Every service but the one that makes the keys.
        self.processes = sorted(names.keys() - {"keys"})
        if engine == "podman":
            # podman before 4.5 has no option for start_interval, and podman-compose does not ask.
            lines = [f"  {service}: {{healthcheck: {{start_interval: !reset null}}}}" for service in self.processes]
            override = scratch / f"no-start-interval-{len(files)}.yml"
            override.write_text("\n".join(["services:", *lines, ""]))
            files = [*files, override]
        self._compose = [*compose, "-p", name]
        for file in files:
            self._compose += ["-f", str(file)]

    def up(self) -> None:
        """Creates and starts all containers.

        podman-compose passes depends_on to podman as --requires, and podman 4.3 restarts no container that requires
        one that has ended, as `keys` has. So there it starts the services without them, the keys first, and then one
        that creates the network's bridge.
        """
        if self._engine == "docker":
            self.compose("up", "--detach", "--no-build")
            return
        self.compose("up", "-d", "--no-build", "--no-deps", "keys")
        self.wait_until(lambda: not self.state("keys").is_running, "the end of the service keys")
        self.compose("up", "-d", "--no-build", "--no-deps", self.processes[0])
        self._keep_address_of_bridge()
        self.compose("up", "-d", "--no-build", "--no-deps")

    def _keep_address_of_bridge(self) -> None:
        """Sets the MAC address that the network's bridge has.

        Linux gives a bridge the lowest address of its ports, until someone sets one: udev does, where it runs. Without
        it the address changes as containers come and go. Their ARP entries for the name server at the bridge are then
        wrong for up to a minute, in which no name is resolved: workers took 40 to 60 s to find their scheduler.
        """
        network = json.loads(_run([self._engine, "network", "inspect", f"{self._name}_default"]))[0]
        bridge = network["network_interface"]
        address = Path(f"/sys/class/net/{bridge}/address").read_text().strip()
        _run(["ip", "link", "set", "dev", bridge, "address", address])

    def compose(self, *arguments: str) -> str:
        return _run([*self._compose, *arguments])

    def state(self, service: str) -> State:
        found = json.loads(_run([self._engine, "inspect", self._container(service)]))[0]
        return State(
            is_running=bool(found["State"]["Running"]),
            exit_code=int(found["State"]["ExitCode"]),
            num_restarts=int(found["RestartCount"]),
            restart_policy=str(found["HostConfig"]["RestartPolicy"]["Name"]),
        )

    def exec(self, service: str, *command: str) -> str:
        return _run([self._engine, "exec", self._container(service), *command])

    def is_healthy(self, service: str) -> bool:
        """Runs the service's health check with podman, whose own timers need systemd; docker runs it by itself."""
        container = self._container(service)
        if self._engine == "podman":
            command = [self._engine, "healthcheck", "run", container]
            return subprocess.run(command, capture_output=True, check=False, timeout=60).returncode == 0
        return _run([self._engine, "inspect", "-f", "{{.State.Health.Status}}", container]).strip() == "healthy"

    def wait_until_healthy(self, services: Sequence[str], patience_s: float = 300.0) -> float:
        """Returns the seconds until every service has been healthy. Raises TimeoutError."""
        began = time.monotonic()
        for service in services:
            self.wait_until(lambda service=service: self.is_healthy(service), f"the health of {service}", patience_s)
        return time.monotonic() - began

    def wait_until(self, condition: Callable[[], bool], what: str, patience_s: float = 120.0) -> None:
        """Raises TimeoutError."""
        end = time.monotonic() + patience_s
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(f"{what} did not come within {patience_s:.0f} s")
            time.sleep(_POLL_S)

    def kill(self, service: str) -> None:
        """Kills the processes of a container from inside, as a fault would. A kill by the engine counts as a stop by
        its user, after which no restart policy applies. Success shows in `state`: the shell that kills dies with its
        container, and the engine then reports whatever it makes of that."""
        command = [self._engine, "exec", self._container(service), "sh", "-c", "kill -9 -1"]
        subprocess.run(command, capture_output=True, check=False, timeout=60)

    def logs(self, service: str) -> str:
        command = [self._engine, "logs", "--tail", "40", self._container(service)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        return done.stdout + done.stderr

    def _container(self, service: str) -> str:
        label = "com.docker.compose"
        filters = [f"--filter=label={label}.project={self._name}", f"--filter=label={label}.service={service}"]
        found = _run([self._engine, "ps", "--all", "--quiet", *filters]).split()
        if len(found) != 1:
            raise CommandError(f"service {service} of project {self._name} has {len(found)} containers, not 1")
        return found[0]


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_COMMAND_TIMEOUT_S)
    if done.returncode != 0:
        raise CommandError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout
