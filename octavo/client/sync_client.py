"""The synchronous client."""

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Unpack

import grpc
import tenacity

from octavo.client.assembly import Assembly
from octavo.client.connection import DEFAULT_TARGET, key_metadata, open_channel
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


class GenerationStream(Iterator[StreamEvent]):
    """The events of one request. It goes on by itself after a lost connection; closing it early cancels the request."""

    def __init__(
        self,
        client: "Client",
        request: pb.GenerateRequest,
        timeout: float | None,
        metadata: Sequence[tuple[str, str]],
    ):
        self._client, self._metadata = client, metadata
        self._assembly = Assembly(request)
        self._targets = client.new_targets()
        self._deadline = Deadline(timeout)
        self._call: Any = None
        self._retry = tenacity.Retrying(
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

    def __iter__(self) -> "GenerationStream":
        return self

    def __next__(self) -> StreamEvent:
        while not self._assembly.finished:
            event = self._assembly.accept(self._retry(self._receive))
            if event is not None:
                return event
        self.close()
        raise StopIteration

    def _receive(self) -> pb.GenerateResponse:
        if self._call is None:
            stub = self._client.stub(self._targets.current)
            self._call = stub.Generate(
                self._assembly.next_call(), timeout=self._deadline.remaining(), metadata=self._metadata
            )
        try:
            return next(self._call)
        except grpc.RpcError as error:
            self._call = None
            raise from_rpc_error(error) from None
        except StopIteration:
            raise ProtocolError("the stream ended before `finished`") from None

    def close(self) -> None:
        """Cancels the request if it runs still."""
        if self._call is not None:
            self._call.cancel()
            self._call = None

    def __enter__(self) -> "GenerationStream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Client:
    """Talks to one router, or to several that stand in for each other.

        with Client("localhost:50051") as client:
            print(client.chat("What is the capital of France?", SamplingParams(temperature=0)).text)

    target: HOST:PORT or unix:PATH, or several of them. timeout: seconds that a request may take in all, unless the call
    says otherwise; None: no bound. retry_for: seconds without progress during which a request whose connection broke,
    or which no replica could take, is tried again through the next target. A stream goes on where it was, token for
    token. What is refused because servers are too busy is tried again after the time that they ask for, if timeout and
    retry_for leave it, and as long as few of this client's requests are refused (octavo.client.retry). api_key: of a
    router that asks for one. credentials: for TLS, of `octavo.tls_credentials` or grpc.ssl_channel_credentials; None:
    no TLS. Errors are those of `octavo.client.errors`. Safe to use from several threads.
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
        self._channels = {each: open_channel(each, credentials) for each in self.new_targets().all}

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generation:
        """The whole result for text, messages (rendered with the chat template) or token ids."""
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
        """The assistant's answer to messages; plain text stands for one message of the user."""
        return self.generate(as_messages(messages), sampling, timeout=timeout, **options)

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> GenerationStream:
        """The events of a request as they come. The request is sent with the first one asked for."""
        request = generate_request(prompt, sampling, options)
        metadata = (*self._key, *trace_metadata(options.get("trace_headers")))
        return GenerationStream(self, request, self._timeout if timeout is None else timeout, metadata)

    def tokenize(self, prompt: str | Sequence[Message], *, model: str = "") -> Tokenized:
        response: pb.TokenizeResponse = self._unary("Tokenize", tokenize_request(prompt, model))
        return Tokenized(token_ids=tuple(response.token_ids), max_model_len=response.max_model_len)

    def detokenize(self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = False) -> str:
        request = pb.DetokenizeRequest(model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return self._unary("Detokenize", request).text

    def model(self, name: str = "") -> ModelInfo:
        """What is served."""
        return ModelInfo.from_proto(self._unary("GetModel", pb.GetModelRequest(model=name)))

    def cancel(self, request_id: str) -> bool:
        """Ends a live request, whose stream then raises Cancelled. False if no target knows it; those that can't be
        reached are passed over. Raises Unavailable if none can."""
        request, error = pb.CancelRequest(request_id=request_id), None
        reached = False
        for target in self.new_targets().all:
            try:
                if self._cancel_at(target, request):
                    return True
                reached = True
            except Unavailable as unavailable:
                error = unavailable
        if error is not None and not reached:
            raise error
        return False

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def stub(self, target: str) -> rpc.InferenceStub:
        """For GenerationStream."""
        return rpc.InferenceStub(self._channels[target])

    def new_targets(self) -> Targets:
        """For GenerationStream: each request goes through the targets on its own."""
        return Targets(self._targets)

    def _cancel_at(self, target: str, request: pb.CancelRequest) -> bool:
        try:
            return self.stub(target).Cancel(request, timeout=self._timeout, metadata=self._key).cancelled
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    def _unary(self, method: str, request: Any) -> Any:
        targets, deadline = self.new_targets(), Deadline(self._timeout)

        def call() -> Any:
            try:
                return getattr(self.stub(targets.current), method)(
                    request, timeout=deadline.remaining(), metadata=self._key
                )
            except grpc.RpcError as error:
                raise from_rpc_error(error) from None

        return tenacity.Retrying(**RetryPolicy(targets, deadline, self.retry_for, self.retry_budget).arguments())(call)
