"""An AsyncLLM's workers in processes of their own, called from the program's event loop."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from dataclasses import replace

from configs.options import Options
from octavo.client.async_client import AsyncClient, AsyncGenerationStream
from octavo.client.errors import Cancelled
from octavo.client.results import FinishReason, Generation
from octavo.cluster.errors import ClusterError
from octavo.local.outputs import OutputFlow
from octavo.local.own_cluster import OwnCluster
from octavo.local.running import Asked
from runtime.model_files import resolve_model


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
