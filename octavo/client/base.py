"""The code that the synchronous and the asynchronous client share: everything except waiting for answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar, Unpack

import grpc

from octavo.client.assembly import Assembly
from octavo.client.connection import DEFAULT_TARGET, key_metadata
from octavo.client.errors import (
    DuplicateRequest,
    ModelNotFound,
    OctavoError,
    ProtocolError,
    RequestNotFound,
    Unavailable,
    from_rpc_error,
)
from octavo.client.requests import (
    Message,
    Prompt,
    RequestOptions,
    SamplingParams,
    generate_request,
    tokenize_request,
    trace_metadata,
)
from octavo.client.results import Generation, ModelInfo, Tokenized
from octavo.client.retry import DEFAULT_RETRY_FOR, Deadline, RetryBudget, RetryPolicy, Targets
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as rpc

Result = TypeVar("Result")


class BaseStream:
    """The events of one request. It survives lost connections by resuming; closing it early cancels the request."""

    def __init__(
        self,
        client: "BaseClient[Any]",
        request: pb.GenerateRequest,
        timeout: float | None,
        metadata: Sequence[tuple[str, str]],
        *,
        attaches: bool = False,
    ):
        """attaches: to a stream that was begun before; the request has its id and nothing else."""
        self._attaches = attaches
        # It attaches to what its own first call has begun.
        self._has_begun = False
        self._client, self._metadata = client, metadata
        self._assembly = Assembly(request)
        self._targets = client.new_targets()
        self._deadline = Deadline(timeout)
        self._policy = RetryPolicy(self._targets, self._deadline, client.retry_for, client.retry_budget, self._assembly)
        # The current call. Its messages are read without the retry policy; if it fails, the first try raises its error.
        self._call: Any = None
        self._failure: OctavoError | None = None

    @property
    def request_id(self) -> str:
        return self._assembly.request_id

    @property
    def generation(self) -> Generation:
        """The output so far; the whole result once the stream has ended."""
        return self._assembly.generation()

    def close(self) -> None:
        """Cancels the request if it still runs."""
        if self._call is not None:
            self._call.cancel()
            self._call = None

    def _begin_try(self) -> None:
        """Makes a call if there is none. First raises the last call's failure if the retry policy has not seen it."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if self._call is None:
            stub = self._client.stub(self._targets.current)
            if self._attaches:
                method, request = stub.Attach, self._assembly.attach_call()
            else:
                method, request = stub.Generate, self._assembly.next_call()
            self._call = method(request, timeout=self._deadline.remaining(), metadata=self._metadata)

    def _lost(self, error: grpc.RpcError) -> OctavoError:
        """Drops the current call, which failed, and returns its error as an OctavoError."""
        self._call = None
        assembly = self._assembly
        failure = from_rpc_error(error, not_found=RequestNotFound if self._attaches else ModelNotFound)
        if not self._attaches:
            if isinstance(failure, DuplicateRequest) and not assembly.started and assembly.num_calls > 1:
                # An earlier call of this client has begun it: it has no reader, or that call has not ended yet.
                self._attaches = self._has_begun = True
            return failure
        is_unknown = isinstance(failure, RequestNotFound) or failure.code is grpc.StatusCode.UNIMPLEMENTED
        if is_unknown and assembly.started and not assembly.is_parsed:
            # Its router has died: the tokens that are held are all that a resume needs.
            self._attaches = False
            return Unavailable(f"{failure}; resumes", code=failure.code)
        if is_unknown and self._has_begun and not assembly.started:
            self._attaches = False
            return DuplicateRequest(f"{failure}; calls again", code=failure.code)
        return failure

    def _ended_early(self) -> ProtocolError:
        return ProtocolError("the stream ended before `finished`")


Stream = TypeVar("Stream", bound=BaseStream)


@dataclass(frozen=True, slots=True)
class UnaryCall(Generic[Result]):
    """A call with one answer. method: its name in the stub. convert: makes the result from the answer."""

    method: str
    request: Any
    convert: Callable[[Any], Result]


def tokenize_call(prompt: str | Sequence[Message], model: str) -> UnaryCall[Tokenized]:
    return UnaryCall("Tokenize", tokenize_request(prompt, model), Tokenized.from_proto)


def detokenize_call(token_ids: Sequence[int], model: str, skip_special_tokens: bool) -> UnaryCall[str]:
    request = pb.DetokenizeRequest(model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens)
    return UnaryCall("Detokenize", request, lambda response: response.text)


def model_call(name: str) -> UnaryCall[ModelInfo]:
    return UnaryCall("GetModel", pb.GetModelRequest(model=name), ModelInfo.from_proto)


class CancelTally:
    """Collects the answers of targets that do not know a request, or cannot be reached."""

    def __init__(self) -> None:
        self._is_unknown = False
        self._unavailable: Unavailable | None = None

    def note_unknown(self) -> None:
        self._is_unknown = True

    def note_failure(self, error: grpc.RpcError) -> None:
        """Records Unavailable; raises any other error."""
        failure = from_rpc_error(error)
        if not isinstance(failure, Unavailable):
            raise failure from None
        self._unavailable = failure

    def result(self) -> bool:
        """Returns False if any target was reached. Raises Unavailable if none was."""
        if self._unavailable is not None and not self._is_unknown:
            raise self._unavailable
        return False


class BaseClient(Generic[Stream]):
    """Talks to one router, or to several that replace each other on failure."""

    # Set by each client.
    _stream_type: type[Stream]
    _open_channel: Callable[[str, grpc.ChannelCredentials | None], Any]

    def __init__(
        self,
        target: str | Sequence[str] = DEFAULT_TARGET,
        *,
        timeout: float | None = None,
        retry_for: float = DEFAULT_RETRY_FOR,
        api_key: str = "",
        credentials: grpc.ChannelCredentials | None = None,
    ):
        """target: HOST:PORT or unix:PATH, or several of them.

        timeout: seconds for a whole request, unless the call gives its own; None: no limit. retry_for: seconds without
        progress during which a request whose connection broke, or which no replica could take, is retried through the
        next target; a stream continues where it was, token for token. Requests refused because servers are too busy
        are retried after the delay that the servers ask for, if timeout and retry_for allow it and as long as few of
        this client's requests are refused (octavo.client.retry). api_key: for a router that asks for one. credentials:
        for TLS, from `octavo.tls_credentials` or grpc.ssl_channel_credentials; None: no TLS. Errors are those of
        `octavo.client.errors`.
        """
        self._targets = target
        self._timeout = timeout
        self.retry_for = retry_for
        self.retry_budget = RetryBudget()
        self._key = key_metadata(api_key)
        self._channels = {each: self._open_channel(each, credentials) for each in self.new_targets().all}

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Stream:
        """Returns a request's events as they arrive. The request is sent when the first event is read."""
        request = generate_request(prompt, sampling, options)
        metadata = (*self._key, *trace_metadata(options.get("trace_headers")))
        return self._stream_type(self, request, self._timeout if timeout is None else timeout, metadata)

    def attach(self, request_id: str, *, timeout: float | None = None) -> Stream:
        """Returns the events of a request that was begun elsewhere with `detach_timeout`, from its first one.

        Raises RequestNotFound when they are read, if no router holds it (any more). A stream that has begun survives
        lost connections, and by a resume also its router, unless its output is parsed. The last reader has a stream:
        others end with Superseded.
        """
        request = pb.GenerateRequest(request_id=request_id)
        seconds = self._timeout if timeout is None else timeout
        return self._stream_type(self, request, seconds, self._key, attaches=True)

    def stub(self, target: str) -> Any:
        """The stub of a target. The generated stub's types are those of synchronous channels."""
        return rpc.InferenceStub(self._channels[target])

    def new_targets(self) -> Targets:
        """The targets for one request: each request advances through them on its own."""
        return Targets(self._targets)

    def _tries(self, unary: UnaryCall[Any]) -> tuple[Callable[[], Any], RetryPolicy]:
        """A function that makes the call at the current target, and its retry policy."""
        targets, deadline = self.new_targets(), Deadline(self._timeout)

        def call() -> Any:
            method = getattr(self.stub(targets.current), unary.method)
            return method(unary.request, timeout=deadline.remaining(), metadata=self._key)

        return call, RetryPolicy(targets, deadline, self.retry_for, self.retry_budget)

    def _cancel_calls(self, request_id: str) -> list[Callable[[], Any]]:
        """A function per target that calls Cancel there."""
        arguments = {"timeout": self._timeout, "metadata": self._key}
        request = pb.CancelRequest(request_id=request_id)
        return [partial(self.stub(target).Cancel, request, **arguments) for target in self.new_targets().all]
