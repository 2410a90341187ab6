"""The asynchronous client: `octavo.client.sync_client.Client` for asyncio, method by method."""

from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Unpack

import grpc
import tenacity

from octavo.client.assembly import Assembly
from octavo.client.connection import DEFAULT_TARGET, key_metadata, open_async_channel
from octavo.client.errors import ProtocolError, Unavailable, from_rpc_error
from octavo.client.requests import (
    Message,
    Prompt,
    RequestOptions,
    SamplingParams,
    as_messages,
    generate_request,
    tokenize_request,
    trace_metadata,
)
from octavo.client.results import Generation, ModelInfo, StreamEvent, Tokenized
from octavo.client.retry import DEFAULT_RETRY_FOR, Deadline, RetryBudget, RetryPolicy, Targets
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as rpc


class AsyncGenerationStream(AsyncIterator[StreamEvent]):
    """The events of one request. It goes on by itself after a lost connection; closing it early cancels the request."""

    def __init__(
        self,
        client: "AsyncClient",
        request: pb.GenerateRequest,
        timeout: float | None,
        metadata: Sequence[tuple[str, str]],
    ):
        self._client, self._metadata = client, metadata
        self._assembly = Assembly(request)
        self._targets = client.new_targets()
        self._deadline = Deadline(timeout)
        self._call: Any = None
        self._retry = tenacity.AsyncRetrying(
            **RetryPolicy(
                self._targets, self._deadline, client.retry_for, client.retry_budget, self._assembly
            ).arguments()
        )

    @property
    def request_id(self) -> str:
        return self._assembly.request_id

    @property
    def generation(self) -> Generation:
        """What has arrived so far; the whole result once the stream has ended."""
        return self._assembly.generation()

    def __aiter__(self) -> "AsyncGenerationStream":
        return self

    async def __anext__(self) -> StreamEvent:
        while not self._assembly.finished:
            event = self._assembly.accept(await self._retry(self._receive))
            if event is not None:
                return event
        self.close()
        raise StopAsyncIteration

    async def _receive(self) -> pb.GenerateResponse:
        if self._call is None:
            stub = self._client.stub(self._targets.current)
            self._call = stub.Generate(
                self._assembly.next_call(), timeout=self._deadline.remaining(), metadata=self._metadata
            )
        try:
            message = await self._call.read()
        except grpc.RpcError as error:
            self._call = None
            raise from_rpc_error(error) from None
        if message is grpc.aio.EOF:  # type: ignore[attr-defined]
            raise ProtocolError("the stream ended before `finished`")
        return message

    def close(self) -> None:
        """Cancels the request if it runs still."""
        if self._call is not None:
            self._call.cancel()
            self._call = None

    async def __aenter__(self) -> "AsyncGenerationStream":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """Talks to one router, or to several that stand in for each other; see `octavo.client.sync_client.Client`.

    async with AsyncClient("localhost:50051") as client:
        async for event in client.stream([{"role": "user", "content": "What is the capital of France?"}]):
            if isinstance(event, Delta):
                print(event.text, end="", flush=True)
    """

    def __init__(
        self,
        target: str | Sequence[str] = DEFAULT_TARGET,
        *,
        timeout: float | None = None,
        retry_for: float = DEFAULT_RETRY_FOR,
        api_key: str = "",
        credentials: grpc.ChannelCredentials | None = None,
    ):
        self._targets = target
        self._timeout = timeout
        self.retry_for = retry_for
        self.retry_budget = RetryBudget()
        self._key = key_metadata(api_key)
        self._channels = {each: open_async_channel(each, credentials) for each in self.new_targets().all}

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 (the server is told, too)
        **options: Unpack[RequestOptions],
    ) -> Generation:
        """The whole result for text, messages (rendered with the chat template) or token ids."""
        async with self.stream(prompt, sampling, timeout=timeout, **options) as stream:
            async for _ in stream:
                pass
            return stream.generation

    async def chat(
        self,
        messages: str | Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 (the server is told, too)
        **options: Unpack[RequestOptions],
    ) -> Generation:
        """The assistant's answer to messages; plain text stands for one message of the user."""
        return await self.generate(as_messages(messages), sampling, timeout=timeout, **options)

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerationStream:
        """The events of a request as they come. The request is sent with the first one asked for."""
        request = generate_request(prompt, sampling, options)
        metadata = (*self._key, *trace_metadata(options.get("trace_headers")))
        return AsyncGenerationStream(self, request, self._timeout if timeout is None else timeout, metadata)

    async def tokenize(self, prompt: str | Sequence[Message], *, model: str = "") -> Tokenized:
        response: pb.TokenizeResponse = await self._unary("Tokenize", tokenize_request(prompt, model))
        return Tokenized(token_ids=tuple(response.token_ids), max_model_len=response.max_model_len)

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = False) -> str:
        request = pb.DetokenizeRequest(model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return (await self._unary("Detokenize", request)).text

    async def model(self, name: str = "") -> ModelInfo:
        """What is served."""
        return ModelInfo.from_proto(await self._unary("GetModel", pb.GetModelRequest(model=name)))

    async def cancel(self, request_id: str) -> bool:
        """Ends a live request, whose stream then raises Cancelled. False if no target knows it; those that can't be
        reached are passed over. Raises Unavailable if none can."""
        request, error = pb.CancelRequest(request_id=request_id), None
        reached = False
        for target in self.new_targets().all:
            try:
                if await self._cancel_at(target, request):
                    return True
                reached = True
            except Unavailable as unavailable:
                error = unavailable
        if error is not None and not reached:
            raise error
        return False

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def stub(self, target: str) -> Any:
        """For AsyncGenerationStream. The generated stub's types are those of the synchronous one."""
        return rpc.InferenceStub(self._channels[target])

    def new_targets(self) -> Targets:
        """For AsyncGenerationStream: each request goes through the targets on its own."""
        return Targets(self._targets)

    async def _cancel_at(self, target: str, request: pb.CancelRequest) -> bool:
        try:
            return (await self.stub(target).Cancel(request, timeout=self._timeout, metadata=self._key)).cancelled
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    async def _unary(self, method: str, request: Any) -> Any:
        targets, deadline = self.new_targets(), Deadline(self._timeout)

        async def call() -> Any:
            try:
                return await getattr(self.stub(targets.current), method)(
                    request, timeout=deadline.remaining(), metadata=self._key
                )
            except grpc.RpcError as error:
                raise from_rpc_error(error) from None

        return await tenacity.AsyncRetrying(
            **RetryPolicy(targets, deadline, self.retry_for, self.retry_budget).arguments()
        )(call)
