"""The asynchronous client: `octavo.client.sync_client.Client` for asyncio, method by method."""

from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Unpack

import grpc
import grpc.aio

from octavo.client.base import (
    BaseClient,
    BaseStream,
    CancelTally,
    Result,
    UnaryCall,
    detokenize_call,
    model_call,
    tokenize_call,
)
from octavo.client.connection import open_async_channel
from octavo.client.errors import from_rpc_error
from octavo.client.requests import Message, Prompt, RequestOptions, SamplingParams, as_messages
from octavo.client.results import Generation, ModelInfo, StreamEvent, Tokenized
from protos import inference_pb2 as pb


class AsyncGenerationStream(BaseStream, AsyncIterator[StreamEvent]):
    """The events of one request. It survives lost connections by resuming; closing it early cancels the request."""

    def __aiter__(self) -> "AsyncGenerationStream":
        return self

    async def __anext__(self) -> StreamEvent:
        while not self._assembly.finished:
            event = self._assembly.accept(await self._next_message())
            if event is not None:
                return event
        self.close()
        raise StopAsyncIteration

    async def _next_message(self) -> pb.GenerateResponse:
        if self._call is not None:
            try:
                return self._checked(await self._call.read())
            except grpc.RpcError as error:
                self._failure = self._lost(error)
        return await self._policy.run_async(self._try_message)

    async def _try_message(self) -> pb.GenerateResponse:
        self._begin_try()
        try:
            return self._checked(await self._call.read())
        except grpc.RpcError as error:
            raise self._lost(error) from None

    def _checked(self, message: pb.GenerateResponse) -> pb.GenerateResponse:
        if message is grpc.aio.EOF:  # type: ignore[attr-defined]
            raise self._ended_early()
        return message

    async def __aenter__(self) -> "AsyncGenerationStream":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient(BaseClient[AsyncGenerationStream]):
    """Talks to one router, or to several that replace each other on failure.

    async with AsyncClient("localhost:50051") as client:
        async for event in client.stream([{"role": "user", "content": "What is the capital of France?"}]):
            if isinstance(event, Delta):
                print(event.text, end="", flush=True)
    """

    _stream_type = AsyncGenerationStream
    _open_channel = staticmethod(open_async_channel)

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 (the server gets it, too)
        **options: Unpack[RequestOptions],
    ) -> Generation:
        """Returns the whole result for text, messages (rendered with the chat template) or token ids."""
        async with self.stream(prompt, sampling, timeout=timeout, **options) as stream:
            async for _ in stream:
                pass
            return stream.generation

    async def chat(
        self,
        messages: str | Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 (the server gets it, too)
        **options: Unpack[RequestOptions],
    ) -> Generation:
        """Returns the assistant's answer to messages; plain text is taken as one user message."""
        return await self.generate(as_messages(messages), sampling, timeout=timeout, **options)

    async def tokenize(self, prompt: str | Sequence[Message], *, model: str = "") -> Tokenized:
        return await self._run(tokenize_call(prompt, model))

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = False) -> str:
        return await self._run(detokenize_call(token_ids, model, skip_special_tokens))

    async def model(self, name: str = "") -> ModelInfo:
        """Describes the served model."""
        return await self._run(model_call(name))

    async def cancel(self, request_id: str) -> bool:
        """Ends a live request; its stream then raises Cancelled. Returns False if no target knows the request.

        Skips targets that cannot be reached; raises Unavailable if none can be.
        """
        tally = CancelTally()
        for call in self._cancel_calls(request_id):
            try:
                if (await call()).cancelled:
                    return True
                tally.note_unknown()
            except grpc.RpcError as error:
                tally.note_failure(error)
        return tally.result()

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self, unary: UnaryCall[Result]) -> Result:
        call, policy = self._tries(unary)

        async def attempt() -> object:
            try:
                return await call()
            except grpc.RpcError as error:
                raise from_rpc_error(error) from None

        return unary.convert(await policy.run_async(attempt))
