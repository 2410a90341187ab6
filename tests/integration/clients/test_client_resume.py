"""Both clients against a server that misbehaves: a stream that is lost continues token for token."""

import asyncio
import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager

import grpc
import pytest

from octavo import AsyncClient, Client, Delta, SamplingParams
from octavo.client import errors
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as rpc

PROMPT = [3, 1, 4]
NUM_TOKENS = 6
Script = Callable[["FlakyServer", pb.GenerateRequest, grpc.ServicerContext], Iterator[pb.GenerateResponse]]


class FlakyServer(rpc.InferenceServicer):
    """Emits token i as "<i>". scripts: the behaviour of each call in turn; calls after them run to the end."""

    def __init__(self, *scripts: Script):
        self.calls: list[pb.GenerateRequest] = []
        self.cancelled = threading.Event()
        self._scripts = itertools.chain(scripts, itertools.repeat(to_the_end))

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        self.calls.append(request)
        yield from next(self._scripts)(self, request, context)

    def GetModel(self, request: pb.GetModelRequest, context: grpc.ServicerContext) -> pb.ModelInfo:
        return pb.ModelInfo(name="fake", max_model_len=100, default_sampling=pb.SamplingParams(top_p=0.5))

    def Tokenize(self, request: pb.TokenizeRequest, context: grpc.ServicerContext) -> pb.TokenizeResponse:
        return pb.TokenizeResponse(token_ids=map(ord, request.prompt), max_model_len=100)

    def Detokenize(self, request: pb.DetokenizeRequest, context: grpc.ServicerContext) -> pb.DetokenizeResponse:
        return pb.DetokenizeResponse(text="".join(map(chr, request.token_ids)))

    def Cancel(self, request: pb.CancelRequest, context: grpc.ServicerContext) -> pb.CancelResponse:
        self.cancelled.set()
        return pb.CancelResponse(cancelled=request.request_id == "live")


def started(request: pb.GenerateRequest) -> pb.GenerateResponse:
    sampling = pb.SamplingParams(seed=7, n=1, max_tokens=NUM_TOKENS)
    return pb.GenerateResponse(
        started=pb.Started(
            request_id=request.request_id,
            seed=7,
            prompt_token_ids=PROMPT,
            sampling=sampling,
            fingerprint="f",
            model="fake",
            attempt=request.resume.attempt,
        )
    )


def token(position: int) -> pb.GenerateResponse:
    finish = pb.Finish(reason=pb.FINISH_REASON_LENGTH) if position == NUM_TOKENS - 1 else None
    return pb.GenerateResponse(
        chunk=pb.Chunk(first_token=position, token_ids=[position], text=f"<{position}>", exact=True, finish=finish)
    )


def num_held(request: pb.GenerateRequest) -> int:
    return len(request.resume.choices[0].output_token_ids) if request.resume.choices else 0


def to_the_end(server: FlakyServer, request: pb.GenerateRequest, context: grpc.ServicerContext):
    yield started(request)
    yield from map(token, range(num_held(request), NUM_TOKENS))
    usage = pb.Usage(prompt_tokens=len(PROMPT), completion_tokens=NUM_TOKENS)
    yield pb.GenerateResponse(finished=pb.Finished(usage=usage))


def lose_after(num_tokens: int, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> Script:
    def script(server: FlakyServer, request: pb.GenerateRequest, context: grpc.ServicerContext):
        yield started(request)
        yield from map(token, range(num_held(request), num_held(request) + num_tokens))
        context.abort(code, "the replica went away")

    return script


def refuse(code: grpc.StatusCode, message: str = "not now") -> Script:
    def script(server: FlakyServer, request: pb.GenerateRequest, context: grpc.ServicerContext):
        context.abort(code, message)
        yield

    return script


def wait_for_cancel(server: FlakyServer, request: pb.GenerateRequest, context: grpc.ServicerContext):
    context.add_callback(server.cancelled.set)
    yield started(request)
    yield token(0)
    server.cancelled.wait(30)


def repeat_and_skip(server: FlakyServer, request: pb.GenerateRequest, context: grpc.ServicerContext):
    yield started(request)
    yield token(0)
    yield token(0)
    yield token(2)


def end_early(server: FlakyServer, request: pb.GenerateRequest, context: grpc.ServicerContext):
    yield started(request)


@contextmanager
def serving(server: FlakyServer) -> Iterator[str]:
    host = grpc.server(futures.ThreadPoolExecutor(4))
    rpc.add_InferenceServicer_to_server(server, host)
    port = host.add_insecure_port("127.0.0.1:0")
    host.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        host.stop(None).wait()


@pytest.fixture
def nothing_listens() -> Iterator[str]:
    """The address of a port that this process holds but does not listen on."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


@pytest.fixture(params=["sync", "async"])
def generate(request: pytest.FixtureRequest):
    """`generate(targets, ...)` with each of the clients, which share one contract."""

    def with_sync(targets, *, retry_for: float = 20.0, **arguments):
        with Client(targets, retry_for=retry_for) as client:
            return client.generate("hi", SamplingParams(temperature=0), **arguments)

    def with_async(targets, *, retry_for: float = 20.0, **arguments):
        async def run():
            async with AsyncClient(targets, retry_for=retry_for) as client:
                return await client.generate("hi", SamplingParams(temperature=0), **arguments)

        return asyncio.run(run())

    return with_sync if request.param == "sync" else with_async


def test_a_lost_stream_goes_on_token_for_token(generate) -> None:
    server = FlakyServer(lose_after(2), lose_after(3))
    with serving(server) as target:
        result = generate(target)
    assert result.choices[0].token_ids == tuple(range(NUM_TOKENS))
    assert result.text == "".join(f"<{i}>" for i in range(NUM_TOKENS))
    assert result.num_resumes == 2
    assert [call.resume.attempt for call in server.calls] == [0, 1, 2]
    assert [num_held(call) for call in server.calls] == [0, 2, 5]
    assert server.calls[2].resume.choices[0].text_bytes_delivered == len("<0>" * 5)
    assert len({call.request_id for call in server.calls}) == 1


def test_the_next_target_takes_over(generate) -> None:
    first, second = FlakyServer(lose_after(1)), FlakyServer()
    with serving(first) as a, serving(second) as b:
        result = generate([a, b])
    assert result.choices[0].token_ids == tuple(range(NUM_TOKENS))
    assert (len(first.calls), len(second.calls)) == (1, 1)


def test_a_target_where_nothing_listens_is_passed_over(generate, nothing_listens: str) -> None:
    with serving(FlakyServer()) as target:
        assert generate([nothing_listens, target]).choices[0].token_ids == tuple(range(NUM_TOKENS))


def test_before_it_has_started_the_same_request_is_sent_again(generate) -> None:
    """ALREADY_EXISTS then means the lost call: its router has not noticed yet that the client is gone."""
    server = FlakyServer(refuse(grpc.StatusCode.UNAVAILABLE), refuse(grpc.StatusCode.ALREADY_EXISTS))
    with serving(server) as target:
        result = generate(target)
    assert result.num_resumes == 0
    assert len(server.calls) == 3
    assert server.calls[0] == server.calls[1] == server.calls[2]


def test_a_stream_that_was_read_too_slowly_goes_on(generate) -> None:
    with serving(FlakyServer(lose_after(2, grpc.StatusCode.RESOURCE_EXHAUSTED))) as target:
        assert generate(target).num_resumes == 1


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidRequest),
        (grpc.StatusCode.NOT_FOUND, errors.ModelNotFound),
        (grpc.StatusCode.ALREADY_EXISTS, errors.DuplicateRequest),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.Overloaded),
        (grpc.StatusCode.ABORTED, errors.Superseded),
        (grpc.StatusCode.INTERNAL, errors.ServerError),
    ],
)
def test_what_a_retry_cannot_mend_is_raised_at_once_in_the_servers_words(
    generate, code: grpc.StatusCode, kind: type[errors.OctavoError]
) -> None:
    server = FlakyServer(refuse(code, "top_p=2: use a value in (0, 1]"))
    with serving(server) as target, pytest.raises(kind, match=r"^top_p=2: use a value") as caught:
        generate(target)
    assert caught.value.code is code
    assert len(server.calls) == 1


def test_an_outage_longer_than_retry_for_is_unavailable(generate, nothing_listens: str) -> None:
    with pytest.raises(errors.Unavailable):
        generate(nothing_listens, retry_for=0.0)


def test_the_timeout_bounds_retries_too(generate, nothing_listens: str) -> None:
    with pytest.raises(errors.DeadlineExceeded, match=r"timeout of 0\.3 s"):
        generate(nothing_listens, timeout=0.3)


def test_the_timeout_reaches_the_server(generate) -> None:
    with serving(FlakyServer(wait_for_cancel)) as target, pytest.raises(errors.DeadlineExceeded):
        generate(target, timeout=0.5)


@pytest.mark.parametrize(("script", "words"), [(repeat_and_skip, "gap"), (end_early, "before `finished`")])
def test_a_broken_stream_is_a_protocol_error(generate, script: Script, words: str) -> None:
    with serving(FlakyServer(script)) as target, pytest.raises(errors.ProtocolError, match=words):
        generate(target)


def test_leaving_a_stream_early_cancels_the_request() -> None:
    server = FlakyServer(wait_for_cancel)
    with serving(server) as target, Client(target) as client:
        with client.stream("hi") as stream:
            assert any(isinstance(event, Delta) for event in stream)
        assert server.cancelled.wait(10)


async def test_leaving_an_async_stream_early_cancels_the_request() -> None:
    server = FlakyServer(wait_for_cancel)
    with serving(server) as target:
        async with AsyncClient(target) as client:
            async with client.stream("hi") as stream:
                async for event in stream:
                    if isinstance(event, Delta):
                        break
            assert await asyncio.to_thread(server.cancelled.wait, 10)


def test_the_smaller_calls() -> None:
    with serving(FlakyServer()) as target, Client(target) as client:
        assert client.model().default_sampling == SamplingParams(top_p=0.5, n=0)
        assert client.tokenize("ab").token_ids == (97, 98)
        assert client.detokenize([97, 98]) == "ab"
        assert (client.cancel("live"), client.cancel("gone")) == (True, False)


async def test_the_smaller_async_calls() -> None:
    with serving(FlakyServer()) as target:
        async with AsyncClient(target) as client:
            assert (await client.model()).max_model_len == 100
            assert (await client.tokenize("ab")).token_ids == (97, 98)
            assert await client.detokenize([97, 98]) == "ab"
            assert [await client.cancel(each) for each in ("live", "gone")] == [True, False]
