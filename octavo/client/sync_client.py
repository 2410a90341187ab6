"""The synchronous client."""

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Unpack

import grpc

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
from octavo.client.connection import open_channel
from octavo.client.errors import from_rpc_error
from octavo.client.requests import Message, Prompt, RequestOptions, SamplingParams, as_messages
from octavo.client.results import Generation, ModelInfo, StreamEvent, Tokenized
from protos import inference_pb2 as pb


class GenerationStream(BaseStream, Iterator[StreamEvent]):
    """The events of one request. It survives lost connections by resuming; closing it early cancels the request."""

    def __iter__(self) -> "GenerationStream":
        return self

    def __next__(self) -> StreamEvent:
        while not self._assembly.finished:
            event = self._assembly.accept(self._next_message())
            if event is not None:
                return event
        self.close()
        raise StopIteration

    def _next_message(self) -> pb.GenerateResponse:
        if self._call is not None:
            try:
                return next(self._call)
            except grpc.RpcError as error:
                self._failure = self._lost(error)
            except StopIteration:
                raise self._ended_early() from None
        return self._policy.run(self._try_message)

    def _try_message(self) -> pb.GenerateResponse:
        self._begin_try()
        try:
            return next(self._call)
        except grpc.RpcError as error:
            raise self._lost(error) from None
        except StopIteration:
            raise self._ended_early() from None

    def __enter__(self) -> "GenerationStream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Client(BaseClient[GenerationStream]):
    """Talks to one router, or to several that replace each other on failure. Safe to use from several threads.

    with Client("localhost:50051") as client:
        print(client.chat("What is the capital of France?", SamplingParams(temperature=0)).text)
    """

    _stream_type = GenerationStream
    _open_channel = staticmethod(open_channel)

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generation:
        """Returns the whole result for text, messages (rendered with the chat template) or token ids."""
        with self.stream(prompt, sampling, timeout=timeout, **options) as stream:
            for _ in stream:
                pass
            return stream.generation

    def chat(
        self,
        messages: str | Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generation:
        """Returns the assistant's answer to messages; plain text is taken as one user message."""
        return self.generate(as_messages(messages), sampling, timeout=timeout, **options)

    def tokenize(self, prompt: str | Sequence[Message], *, model: str = "") -> Tokenized:
        return self._run(tokenize_call(prompt, model))

    def detokenize(self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = False) -> str:
        return self._run(detokenize_call(token_ids, model, skip_special_tokens))

    def model(self, name: str = "") -> ModelInfo:
        """Describes the served model."""
        return self._run(model_call(name))

    def cancel(self, request_id: str) -> bool:
        """Ends a live request; its stream then raises Cancelled. Returns False if no target knows the request.

        Skips targets that cannot be reached; raises Unavailable if none can be.
        """
        tally = CancelTally()
        for call in self._cancel_calls(request_id):
            try:
                if call().cancelled:
                    return True
                tally.note_unknown()
            except grpc.RpcError as error:
                tally.note_failure(error)
        return tally.result()

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, unary: UnaryCall[Result]) -> Result:
        call, policy = self._tries(unary)

        def attempt() -> object:
            try:
                return call()
            except grpc.RpcError as error:
                raise from_rpc_error(error) from None

        return unary.convert(policy.run(attempt))
