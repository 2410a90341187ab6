"""Starts clusters of `octavo up` and measures them."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, Self

import yaml

from configs.options import Options
from octavo.bench.backends.grpc_calls import GrpcBackend
from octavo.bench.serve import Load, measure
from octavo.client.admin import Admin
from octavo.client.errors import OctavoError
from octavo.cluster.errors import ClusterError
from octavo.cluster.ports import with_port
from octavo.cluster.readiness import router_targets
from octavo.cluster.runtime_files import child_environment
from octavo.lab.bounds import as_measured
from octavo.lab.errors import TuningError
from octavo.lab.settings import GivenOptions, Setting

_MAIN = "from octavo.cli.main import main; main()"
_SERVING = "serving; Ctrl-C to stop"
_STOP_TIMEOUT_S = 60.0
# Before a cluster counts as one that does not start: models may load for minutes.
_START_TIMEOUT_S = 1800.0
_LINES_KEPT = 40
# Lines of a failed cluster that a reason has.
_LINES_TOLD = 3


class TrialFailed(Exception):
    """A setting with which the cluster does not start or does not serve; the message says why."""


# Tests and benchmarks tune clusters on a virtual clock, too.
class Cluster(Protocol):
    """A running cluster, which its context ends."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def measure(self, load: Load) -> dict[str, Any]:
        """Empties the prefix caches and sends a load. Returns its numbers as `as_measured`. Raises TrialFailed."""
        ...


# Tests and benchmarks tune clusters on a virtual clock, too.
class Clusters(Protocol):
    """Two kinds: on this machine, and on a virtual clock (tests.support.scheduler.simulated_clusters), which
    benchmarks use as well."""

    def options(self, setting: Setting, memory: Mapping[str, float]) -> Options:
        """Raises ConfigError for values that do not go together."""
        ...

    def open(self, setting: Setting, memory: Mapping[str, float], trace: Path | None = None) -> Cluster:
        """Returns a cluster that starts as it is entered, and then raises TrialFailed if it does not.

        memory: options of memory, on top of the setting's. trace: records there.
        """
        ...

    def traces(self, trace: Path) -> list[Path]:
        """The files that a cluster with this trace has left."""
        ...


class LocalClusters:
    """Clusters on this machine. given: the options that all share. logs: a folder for their output."""

    def __init__(self, given: GivenOptions, logs: Path) -> None:
        """Raises TuningError for options that keep this process out."""
        self._given, self._logs = given, logs
        options = given.options()
        for name in ("tls_cert_file", "api_keys_file"):
            if value := getattr(options, name):
                raise TuningError(f"{name}={value!r}: clusters that are measured here take plain calls; leave it out")

    def options(self, setting: Setting, memory: Mapping[str, object]) -> Options:
        return self._given.options({**setting.options, **memory})

    def open(self, setting: Setting, memory: Mapping[str, float], trace: Path | None = None) -> "LocalCluster":
        more: dict[str, Any] = {"http_port": 0, "metrics_port": 0, "port": 0}
        if trace is not None:
            trace.parent.mkdir(parents=True, exist_ok=True)
            more["trace"] = str(trace.resolve())
        options = self.options(setting, {**memory, **more})
        self._logs.mkdir(parents=True, exist_ok=True)
        name = "".join(letter if letter.isalnum() else "_" for letter in setting.label)
        return LocalCluster(options, self._logs / f"{name}.log")

    def traces(self, trace: Path) -> list[Path]:
        return sorted(trace.parent.glob(f"{trace.stem}.*{trace.suffix}*"))


class LocalCluster:
    def __init__(self, options: Options, log: Path) -> None:
        self._log_path, self._latest = log, deque[str](maxlen=_LINES_KEPT)
        self._runtime_dir = tempfile.TemporaryDirectory(prefix="octavo-tune-")
        directory = Path(self._runtime_dir.name)
        try:
            options = with_port(options.model_copy(update={"runtime_dir": directory / "run"}))
        except ClusterError as error:
            raise TrialFailed(str(error)) from None
        (self._target, *_) = router_targets(options)
        self._file = directory / "options.yaml"
        self._file.write_text(yaml.safe_dump(options.as_file(), sort_keys=False))
        # Set once it serves, or has ended.
        self._has_come, self._serves, self._process = threading.Event(), False, None

    def __enter__(self) -> Self:
        # In a session of its own: Ctrl-C is for this process, which ends the cluster.
        self._process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, "up", "-c", str(self._file)],
            env=child_environment(),
            text=True,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()
        try:
            self._has_come.wait(_START_TIMEOUT_S)
            if not self._serves:
                raise TrialFailed(self._why())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if (process := self._process) is not None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                # It leads its session's only group, so that its processes end with it.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(_STOP_TIMEOUT_S)
            self._reader.join(_STOP_TIMEOUT_S)
        self._runtime_dir.cleanup()

    def measure(self, load: Load) -> dict[str, Any]:
        try:
            with Admin(self._target) as admin:
                admin.reset_prefix_cache()
            report = asyncio.run(measure(load, GrpcBackend(self._target), lambda trace: None))
        except OctavoError as error:
            raise TrialFailed(f"{type(error).__name__}: {error}") from None
        if not self._serves:
            raise TrialFailed(self._why())
        errors = [trace.error for trace in report.traces if trace.error]
        if len(errors) == len(report.traces):
            raise TrialFailed(f"every request failed; the first: {errors[0]}")
        return as_measured(report.as_json())

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with self._log_path.open("a", encoding="utf-8") as log:
            for line in process.stdout:
                log.write(line)
                log.flush()
                self._latest.append(line.rstrip())
                if _SERVING in line:
                    self._serves = True
                    self._has_come.set()
        self._serves = False
        self._has_come.set()

    def _why(self) -> str:
        """The cluster's own words for why it ended."""
        lines = [line.strip() for line in self._latest if line.strip()] or ["it said nothing"]
        causes = [number for number, line in enumerate(lines) if line.startswith("octavo: ")]
        # The message, with the last words of a process in the lines after it.
        said = lines[causes[0] : causes[0] + _LINES_TOLD] if causes else lines[-1:]
        return f"{' '.join(said).removeprefix('octavo: ')} (log: {self._log_path})"
