"""A cluster of this program's own: the processes of `octavo up`, kept running by a thread.

LLM and AsyncLLM call its router when the model has several ranks or replicas."""

import asyncio
import contextlib
import logging
import os
import tempfile
import threading
import urllib.request
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from configs.options import Options
from octavo.client.async_client import AsyncClient, AsyncGenerationStream
from octavo.client.errors import Cancelled
from octavo.client.results import FinishReason, Generation
from octavo.cluster.errors import ClusterError
from octavo.cluster.ports import claimed_ports, resolve_ports, with_free_ports
from octavo.cluster.processes import ProcessSpec, Stage, cluster_processes
from octavo.cluster.quarantine import quarantine_of
from octavo.cluster.readiness import grpc_target, router_targets
from octavo.cluster.runtime_files import child_environment, locked_runtime_dir, write_options
from octavo.cluster.serving import wait_until_serving
from octavo.cluster.supervisor import Supervisor
from octavo.local.running import Asked, OutputFlow
from runtime.model_files import resolve_model

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


# Requests sent ahead of those that run, for each row: enough that rows never wait for a request.
_REQUESTS_A_ROW = 2


class Workers:
    """Computes in a cluster of its own. A worker that dies is started again, and its requests go on."""

    def __init__(self, options: Options) -> None:
        """Returns once all serve. Raises ModelNotFoundError, ClusterError."""
        # At once, and not as the last words of a worker.
        resolve_model(options.model)
        self._cluster = OwnCluster(options)
        # Belongs to the cluster's own event loop, in which all is computed.
        self._failure: asyncio.Future[ClusterError] | None = None
        self._most_at_once = _REQUESTS_A_ROW * options.max_num_seqs * options.data_parallel_size

    @property
    def num_preemptions(self) -> int:
        return self._cluster.num_preemptions

    @property
    def pids(self) -> dict[str, int]:
        """The process ids by name, such as "worker 0.1"."""
        return self._cluster.pids

    def compute(self, asked: Sequence[Asked]) -> list[Generation]:
        """The first error of a request ends all. Raises ClusterError once the cluster can't go on."""
        return self._cluster.run(lambda: self._compute(asked))

    async def _compute(self, asked: Sequence[Asked]) -> list[Generation]:
        computing = asyncio.create_task(self._compute_all(asked))
        if self._failure is None:
            self._failure = asyncio.wrap_future(self._cluster.failure)
        try:
            await asyncio.wait({computing, self._failure}, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                raise self._failure.result()
            return await computing
        finally:
            computing.cancel()
            await asyncio.wait({computing})

    async def _compute_all(self, asked: Sequence[Asked]) -> list[Generation]:
        room = asyncio.Semaphore(self._most_at_once)

        async def one(each: Asked) -> Generation:
            prompt, sampling, options = each
            async with room:
                return await client.generate(prompt, sampling, **options)

        async with AsyncClient(self._cluster.targets) as client:
            tasks = [asyncio.create_task(one(each)) for each in asked]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        self._cluster.close()


class AsyncWorkers:
    """Streams from a cluster of its own. A worker that dies is started again, and its requests go on."""

    def __init__(self, options: Options) -> None:
        """Returns once all serve. Raises ModelNotFoundError, ClusterError."""
        resolve_model(options.model)
        self._cluster = OwnCluster(options)
        self._failure: Exception | None = None
        self._flows: dict[str, OutputFlow] = {}
        self._aborted: set[str] = set()
        # There is one while there are streams: it belongs to their event loop.
        self._client: AsyncClient | None = None
        self._cluster.failure.add_done_callback(self._note_failure)

    @property
    def pids(self) -> dict[str, int]:
        """The process ids by name, such as "worker 0.1"."""
        return self._cluster.pids

    async def stream(self, request_id: str, asked: Asked) -> AsyncGenerator[Generation, None]:
        if self._failure is not None:
            raise self._failure
        prompt, sampling, options = asked
        flow = self._flows[request_id] = OutputFlow()
        if self._client is None:
            self._client = AsyncClient(self._cluster.targets)
        try:
            with contextlib.closing(self._client.stream(prompt, sampling, **options)) as stream:
                receiving = asyncio.create_task(self._receive(stream, flow))
                try:
                    async for output in flow.read(lambda: self._generation(stream)):
                        yield output
                finally:
                    receiving.cancel()
                    await asyncio.wait({receiving})
        finally:
            del self._flows[request_id]
            self._aborted.discard(request_id)
            if not self._flows and self._client is not None:
                client, self._client = self._client, None
                await client.close()

    async def _receive(self, stream: AsyncGenerationStream, flow: OutputFlow) -> None:
        try:
            async for _ in stream:
                flow.notify()
            flow.notify()
        except Cancelled as error:
            flow.notify(None if stream.request_id in self._aborted else error)
        except Exception as error:  # noqa: BLE001 (its reader raises it)
            flow.notify(error)

    def _generation(self, stream: AsyncGenerationStream) -> Generation:
        found = stream.generation
        if found.finished or stream.request_id not in self._aborted:
            return found
        ended = (replace(each, finish_reason=each.finish_reason or FinishReason.CANCELLED) for each in found.choices)
        return replace(found, choices=tuple(ended))

    async def abort(self, request_id: str) -> None:
        if flow := self._flows.get(request_id):
            self._aborted.add(request_id)
            flow.notify()

    def close(self) -> None:
        self._fail(RuntimeError("the LLM has been shut down"))
        self._cluster.close()

    def _note_failure(self, failure: "Future[ClusterError]") -> None:
        self._fail(failure.result())

    def _fail(self, error: Exception) -> None:
        self._failure = error
        for flow in list(self._flows.values()):
            flow.notify(error)
