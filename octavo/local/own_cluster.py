"""A cluster of this program's own: the processes of `octavo up`, kept running by a thread."""

import asyncio
import logging
import os
import tempfile
import threading
import urllib.request
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from configs.options import Options
from octavo.cluster.errors import ClusterError
from octavo.cluster.ports import claimed_ports, resolve_ports, with_free_ports
from octavo.cluster.processes import ProcessSpec, Stage, cluster_processes
from octavo.cluster.quarantine import quarantine_of
from octavo.cluster.readiness import grpc_target, router_targets
from octavo.cluster.runtime_files import child_environment, locked_runtime_dir, write_options
from octavo.cluster.serving import wait_until_serving
from octavo.cluster.supervisor import Supervisor

_log = logging.getLogger("octavo.local")
Result = TypeVar("Result")

# Nothing is left to drain: the program that asked has its answers, or does not want them.
_GRACE = {Stage.ROUTER: 5.0, Stage.SCHEDULER: 5.0, Stage.WORKER: 5.0}
_PREEMPTIONS = "octavo_num_preemptions_total"


class OwnCluster:
    """Starts routers, schedulers and workers on this machine, and restarts those that die, until `close`.

    They end with this process, however it ends.
    """

    def __init__(self, options: Options) -> None:
        """Returns once the cluster serves. Raises ClusterError, with the last words of a process that can't start."""
        for name in ("tls_cert_file", "api_keys_file"):
            if value := getattr(options, name):
                raise ValueError(
                    f"{name}={value!r}: the workers of an LLM serve this program alone, without TLS and keys: leave it "
                    f"out, or start `octavo up` and call it with octavo.Client"
                )
        if options.distributed_executor_backend != "mp":
            raise ValueError(
                f"distributed_executor_backend={options.distributed_executor_backend!r}: an LLM starts its workers on "
                f"this machine: use mp, or start `octavo up --on ray` and call it with octavo.Client"
            )
        self._loop = asyncio.new_event_loop()
        # The children end with the thread that has started them (child.py).
        self._thread = threading.Thread(target=self._loop.run_forever, name="octavo-cluster", daemon=True)
        self._thread.start()
        self._processes = _Processes(options)
        self.close = weakref.finalize(self, _close, self._loop, self._thread, self._processes)
        try:
            self.run(self._processes.start)
        except BaseException:
            self.close()
            raise

    @property
    def targets(self) -> tuple[str, ...]:
        """The routers' addresses."""
        return self._processes.targets

    @property
    def failure(self) -> "Future[ClusterError]":
        """Done once a process has ended and is not restarted; the others have been stopped by then."""
        return self._processes.failure

    @property
    def pids(self) -> dict[str, int]:
        """The process ids by name, such as "worker 0.1"."""
        return self._processes.pids

    @property
    def num_preemptions(self) -> int:
        """Preemptions of all schedulers."""
        return self._processes.num_preemptions()

    def run(self, work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Runs a coroutine in the cluster's thread. Raises its error, and KeyboardInterrupt after cancelling it."""
        future = asyncio.run_coroutine_threadsafe(work(), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


class _Processes:
    """The parts of an OwnCluster; it is used in the cluster's thread, except where a method says otherwise."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._held = ExitStack()
        self._supervisor: Supervisor | None = None
        self._serving: asyncio.Task[None] | None = None
        self.failure: Future[ClusterError] = Future()

    @property
    def targets(self) -> tuple[str, ...]:
        return router_targets(self._options)

    @property
    def pids(self) -> dict[str, int]:
        assert self._supervisor is not None
        return {each.spec.name: each.process.pid for each in self._supervisor.processes if each.process is not None}

    async def start(self) -> None:
        directory = Path(self._held.enter_context(tempfile.TemporaryDirectory(prefix="octavo-llm-")))
        options = self._options
        if "runtime_dir" not in options.model_fields_set:
            options = options.model_copy(update={"runtime_dir": directory})
        # Templates are the program's own, as those of an LLM without workers.
        options = options.model_copy(update={"trust_request_chat_template": True})
        if "no_replica_timeout" not in options.model_fields_set:
            # The program waits for its answers.
            options = options.model_copy(update={"no_replica_timeout": 0.0})
        options = resolve_ports(with_free_ports(options).model_copy(update={"http_port": 0}))
        self._options = options
        self._held.enter_context(locked_runtime_dir(options.runtime_dir))
        self._held.enter_context(claimed_ports(options))
        config = write_options(options, options.runtime_dir)
        specs = cluster_processes(options, config, num_cores=len(os.sched_getaffinity(0)))
        self._supervisor = Supervisor(
            specs,
            # They send no requests to the hub: the model is there.
            environment=child_environment() | {"HF_HUB_OFFLINE": "1"},
            max_restarts=options.max_restarts,
            metrics_host=options.metrics_host,
            hang_timeout=options.hang_timeout,
            on_line=lambda spec, line: _log.debug("%s: %s", spec.name, line),
            on_event=_note_event,
            quarantine=quarantine_of(options, specs, lambda notes: None),
        )
        self._serving = asyncio.create_task(self._serve(self._supervisor))
        ready = asyncio.create_task(wait_until_serving(*self.targets))
        await asyncio.wait({self._serving, ready}, return_when=asyncio.FIRST_COMPLETED)
        if self.failure.done():
            ready.cancel()
            raise self.failure.result()
        await ready
        self._supervisor.note_serving()

    async def _serve(self, supervisor: Supervisor) -> None:
        try:
            await supervisor.run()
        except ClusterError as error:
            self.failure.set_result(error)

    def num_preemptions(self) -> int:
        """Callable from any thread."""
        options, found = self._options, 0
        for replica in range(options.data_parallel_size):
            port = options.process_metrics_port("scheduler", replica)
            url = f"http://{grpc_target(options.metrics_host, port)}/metrics"
            with urllib.request.urlopen(url, timeout=10) as answer:
                lines = answer.read().decode().splitlines()
            found += sum(round(float(line.split()[-1])) for line in lines if line.startswith(f"{_PREEMPTIONS} "))
        return found

    async def stop(self) -> None:
        if self._supervisor is not None and self._serving is not None:
            await self._supervisor.stop(_GRACE)
            await self._serving
        self._held.close()


def _note_event(spec: ProcessSpec, text: str) -> None:
    _log.warning("%s %s", spec.name, text)


def _close(loop: asyncio.AbstractEventLoop, thread: threading.Thread, processes: _Processes) -> None:
    asyncio.run_coroutine_threadsafe(processes.stop(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
