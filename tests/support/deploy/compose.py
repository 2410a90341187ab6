"""Runs the services of docker-compose.yml as processes on loopback, with the same commands, environment and checks."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import yaml

from tests.support.ports import free_ports
from tests.support.repository import ROOT

BASE_METRICS_PORT = 9090
_NUM_METRICS_PORTS = 5
_STEP_PORT = 5555
_STOP_TIMEOUT = 30.0


COMPOSE_FILE = ROOT / "docker-compose.yml"
THIRD_REPLICA = ROOT / "deploy" / "compose" / "third-replica.yml"


def services(*overrides: Path) -> dict[str, dict[str, Any]]:
    """The services of docker-compose.yml with overrides merged into it: maps key by key, everything else as a whole."""
    merged = yaml.safe_load(COMPOSE_FILE.read_text())["services"]
    for override in overrides:
        _merge(merged, yaml.safe_load(override.read_text())["services"])
    return merged


def _merge(into: dict[str, Any], override: dict[str, Any]) -> None:
    for key, value in override.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def environment(service: dict[str, Any]) -> dict[str, str]:
    """The variables that Compose sets in the container, in addition to the image's."""
    return dict(service.get("environment", {}))


class Loopback:
    """Replaces Compose's network and volumes: a loopback port for each host and port, a folder for each path."""

    def __init__(self, directory: Path):
        self._paths = {"/keys": directory / "keys", "/var/cache/octavo": directory / "cache"}
        for path in self._paths.values():
            path.mkdir(mode=0o700)
        self._metrics = free_ports(_NUM_METRICS_PORTS)
        self._ports: dict[tuple[str, int], int] = {}

    def port(self, host: str, port: int) -> int:
        """The loopback port that replaces a service's port. Heartbeats use the port after a step endpoint's."""
        if BASE_METRICS_PORT <= port < BASE_METRICS_PORT + _NUM_METRICS_PORTS:
            return self._metrics + port - BASE_METRICS_PORT
        if (host, port) not in self._ports:
            self._ports[host, port] = free_ports(2 if port == _STEP_PORT else 1)
        return self._ports[host, port]

    def translate(self, text: str, service: str) -> str:
        """A command's argument or a variable's value, translated to loopback."""
        for path, stand_in in self._paths.items():
            text = re.sub(rf"(?<![\w/]){path}\b", str(stand_in), text)
        hosts = "|".join(map(re.escape, services()))

        def address(match: re.Match[str]) -> str:
            # Within a service, 0.0.0.0 and 127.0.0.1 are the service itself.
            host = match["host"] if match["host"] in services() else service
            return f"127.0.0.1:{self.port(host, int(match['port']))}"

        text = re.sub(rf"(?P<host>0\.0\.0\.0|127\.0\.0\.1|{hosts}):(?P<port>\d+)", address, text)
        return text.replace("0.0.0.0", "127.0.0.1")


class Cluster:
    """Every long-running service as a process. Use as a context manager: leaving it kills all processes."""

    def __init__(self, directory: Path, **overrides: str):
        """overrides: environment variables of all processes, such as OCTAVO_WORKER_THREADS."""
        self.directory = directory
        self.network = Loopback(directory)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._overrides = overrides
        self._logs: list[TextIO] = []

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait()
        for log in self._logs:
            log.close()

    def run(self, service: str) -> int:
        """Runs a one-shot service; returns its exit code."""
        return self._start(service).wait(_STOP_TIMEOUT)

    def start(self, service: str) -> None:
        self.processes[service] = self._start(service)

    def stop(self) -> dict[str, int]:
        """Sends SIGTERM, as `docker compose stop` does; returns the exit codes."""
        for process in self.processes.values():
            process.terminate()
        return {service: process.wait(_STOP_TIMEOUT) for service, process in self.processes.items()}

    def log(self, service: str) -> str:
        return (self.directory / f"{service}.log").read_text()

    def wait_until_healthy(self, service: str, timeout: float) -> None:
        """Repeats the service's own health check, as Docker does, until it succeeds."""
        kind, *command = services()[service]["healthcheck"]["test"]
        assert kind == "CMD"
        deadline = time.monotonic() + timeout
        while True:
            check = subprocess.run(
                self._command(command, service),
                env=self._environment(service),
                cwd=ROOT,
                capture_output=True,
                check=False,
            )
            if check.returncode == 0:
                return
            state = self.processes[service].poll()
            assert state is None, f"{service} ended with {state}:\n{self.log(service)}"
            assert time.monotonic() < deadline, f"{service}: {check.stderr.decode()[-500:]}\n{self.log(service)}"
            time.sleep(0.25)

    def _start(self, service: str) -> subprocess.Popen[bytes]:
        log = (self.directory / f"{service}.log").open("w")
        self._logs.append(log)
        return subprocess.Popen(
            self._command(services()[service]["command"], service),
            env=self._environment(service),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )

    def _command(self, command: list[str], service: str) -> list[str]:
        translated = [self.network.translate(part, service) for part in command]
        return [sys.executable if part == "python" else part for part in translated]

    def _environment(self, service: str) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_")}
        # In the image `python` and `octavo` are on the path.
        inherited["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        given = {
            name: self.network.translate(value, service) for name, value in environment(services()[service]).items()
        }
        for name in ("OCTAVO_PORT", "OCTAVO_HTTP_PORT", "OCTAVO_METRICS_PORT", "HEALTH_PORT"):
            if name in given:
                given[name] = str(self.network.port(service, int(given[name])))
        # Containers have their own runtime directories.
        return inherited | given | {"OCTAVO_RUNTIME_DIR": str(self.directory / "run" / service)} | self._overrides
