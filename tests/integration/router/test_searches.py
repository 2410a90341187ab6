"""Beam searches as a client of the router gets them, over real gRPC and HTTP, from fake schedulers.

tests/integration/clients/test_beam_search.py compares them with transformers'.
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from protos import inference_pb2 as pb
from protos.inference_pb2_grpc import InferenceStub
from router.api.gateway.app import Gateway
from router.api.gateway.server import GatewayServer
from router.search.beams import BeamSearch
from router.server import RouterServer
from tests.fakes.routers import Received, receive, running_router, running_schedulers, smollm2_tokenizer, socket_address
from tests.fakes.scheduler import EOS, FakeScheduler, model_info

TOKENS = smollm2_tokenizer()
PROMPT = [100, 200, 300]
WIDTH, MAX_TOKENS = 4, 12
# An ordinary token that ends outputs in some tests.
END = 400


def likely(token_ids: Sequence[int]) -> list[tuple[int, float]]:
    """A model: 40 tokens, END among them, with logprobs that depend on the last three tokens."""
    draw = random.Random(repr(list(token_ids[-3:])))
    logprobs = sorted((-draw.expovariate(0.5) for _ in range(40)), reverse=True)
    return list(zip(draw.sample(range(END - 60, END + 1), 40), logprobs, strict=True))


def best_outputs(*, end_ids: Sequence[int] = (), penalty: float = 1.0, max_tokens: int = MAX_TOKENS) -> list[list[int]]:
    search = BeamSearch(width=WIDTH, length_penalty=penalty, max_tokens=max_tokens, end_ids=end_ids)
    while not search.done:
        search.advance(
            [
                [pb.TokenLogprob(token_id=i, logprob=x) for i, x in likely([*PROMPT, *beam.token_ids])]
                for beam in search.live
            ]
        )
    return [beam.token_ids for _, beam in search.finished]


def request(width: int = WIDTH, **sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=PROMPT),
        sampling=pb.SamplingParams(**{"n": width, "max_tokens": MAX_TOKENS, "ignore_eos": True} | sampling),
        beam_search=pb.BeamSearch(width=width),
    )


def outputs_of(received: Received) -> list[list[int]]:
    return [received.token_ids[index] for index in sorted(received.token_ids)]


@pytest.fixture
async def fakes(tmp_path: Path) -> AsyncIterator[list[FakeScheduler]]:
    fakes = [FakeScheduler(socket_address(tmp_path, name), likely=likely) for name in ("one", "two")]
    async with running_schedulers(*fakes):
        yield fakes


@pytest.fixture
async def router(fakes: list[FakeScheduler]) -> AsyncIterator[tuple[RouterServer, InferenceStub]]:
    async with running_router([fake.address for fake in fakes]) as (server, stub):
        await server.wait_ready()
        yield server, stub


async def begun(fakes: Sequence[FakeScheduler], call: Any) -> tuple[Received, FakeScheduler]:
    """Waits until a search waits for a replica that is paused before token 3. Returns what came, and the replica."""

    def is_asked(fake: FakeScheduler) -> bool:
        return fake.num_live == WIDTH and fake.submitted[-1].sampling.max_tokens == 3

    received = await receive(call, lambda received: received.started is not None)
    waits = [asyncio.create_task(fake.wait_until(is_asked)) for fake in fakes]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    return received, next(filter(is_asked, fakes))


# --- What comes


@pytest.mark.parametrize("penalty", [-1.0, 1.0, 2.0])
async def test_the_best_outputs_come_in_order(router: tuple[RouterServer, InferenceStub], penalty: float) -> None:
    asked = request(stop_token_ids=[END], logprobs=2)
    asked.beam_search.length_penalty = penalty
    received = await receive(router[1].Generate(asked))
    expected = best_outputs(end_ids=[END], penalty=penalty)
    assert outputs_of(received) == expected
    for index, token_ids in enumerate(expected):
        ended = token_ids[-1] == END
        finish = pb.Finish(reason=pb.FINISH_REASON_STOP, stop_token_id=END) if ended else None
        assert received.finish[index] == (finish or pb.Finish(reason=pb.FINISH_REASON_LENGTH))
        assert received.text[index] == TOKENS.decode(token_ids[: len(token_ids) - ended], skip_special_tokens=True)
    chosen = [entry.chosen.token_id for entry in received.logprobs]
    assert chosen == [token_id for token_ids in expected for token_id in token_ids]
    assert {len(entry.top) for entry in received.logprobs} == {2}
    num_tokens = sum(map(len, expected))
    assert received.finished.usage == pb.Usage(prompt_tokens=3, cached_tokens=4, completion_tokens=num_tokens)


async def test_fewer_outputs_than_beams(router: tuple[RouterServer, InferenceStub]) -> None:
    result = await router[1].GenerateUnary(request(n=2))
    assert [list(choice.token_ids) for choice in result.choices] == best_outputs()[:2]


async def test_each_step_is_a_choice_for_each_beam(
    fakes: list[FakeScheduler], router: tuple[RouterServer, InferenceStub]
) -> None:
    """All steps go to one replica, whose prefix cache knows the beams."""
    await receive(router[1].Generate(request()))
    submitted, nothing = sorted((fake.submitted for fake in fakes), key=len, reverse=True)
    assert not nothing
    assert [len(submit.choices) for submit in submitted] == [1] + [WIDTH] * (MAX_TOKENS - 1)
    for step, submit in enumerate(submitted):
        assert {len(start.output_token_ids) for start in submit.choices} == {step}
        assert (submit.sampling.max_tokens, submit.sampling.logprobs) == (step + 1, WIDTH)


# --- Losses


@pytest.fixture
def paused(fakes: list[FakeScheduler]) -> None:
    for fake in fakes:
        fake.pause_at = 2


@pytest.mark.usefixtures("paused")
@pytest.mark.parametrize("cause", ["killed", "drains", "gives it up", "is left"])
async def test_another_replica_goes_on(
    fakes: list[FakeScheduler], router: tuple[RouterServer, InferenceStub], cause: str
) -> None:
    server, stub = router
    call = stub.Generate(request())
    received, busy = await begun(fakes, call)
    other = next(fake for fake in fakes if fake is not busy)
    other.pause_at = None
    if cause == "killed":
        await busy.kill()
    elif cause == "is left":
        await server.intake.live.migrate(received.started.request_id, "")
    else:
        busy.draining = True
        if cause == "drains":
            busy.send_load()
        else:
            busy.give_up_all()
    received = await receive(call, into=received)
    assert outputs_of(received) == best_outputs()
    assert [submit.sampling.max_tokens for submit in other.submitted] == list(range(3, MAX_TOKENS + 1))


@pytest.mark.usefixtures("paused")
async def test_full_queues_in_the_middle_are_waited_for(
    fakes: list[FakeScheduler], router: tuple[RouterServer, InferenceStub]
) -> None:
    call = router[1].Generate(request())
    received, busy = await begun(fakes, call)
    for fake in fakes:
        fake.capacity = 0
    await busy.resume_steps()
    for fake in fakes:
        fake.pause_at = None
        await fake.wait_until(lambda fake: bool(fake.submitted) and fake.num_live == 0)
        fake.capacity = None
    assert outputs_of(await receive(call, into=received)) == best_outputs()


@pytest.mark.parametrize("num_delivered", [0, 1, WIDTH])
async def test_a_resume_gets_what_is_missing(router: tuple[RouterServer, InferenceStub], num_delivered: int) -> None:
    """A client that has the start of its stream, or also the first output, resumes."""
    call = router[1].Generate(request())
    received = await receive(
        call, lambda received: len(received.finish) == num_delivered and received.started is not None
    )
    call.cancel()
    resume = received.resume_request()
    resume.beam_search.CopyFrom(request().beam_search)
    received.begin_again()
    received = await receive(router[1].Generate(resume), into=received)
    assert outputs_of(received) == best_outputs()
    assert received.finished.usage.completion_tokens == WIDTH * MAX_TOKENS


# --- Ends


@pytest.mark.usefixtures("paused")
@pytest.mark.parametrize("cause", ["client", "Cancel", "deadline", "broken"])
async def test_the_end_of_a_search_ends_its_beams(
    fakes: list[FakeScheduler], router: tuple[RouterServer, InferenceStub], cause: str
) -> None:
    server, stub = router
    call = stub.Generate(request(), timeout=1.0 if cause == "deadline" else None)
    received, busy = await begun(fakes, call)
    if cause == "client":
        call.cancel()
    elif cause == "Cancel":
        assert (await stub.Cancel(pb.CancelRequest(request_id=received.started.request_id))).cancelled
    elif cause == "broken":
        busy.is_broken = True
    if cause != "client":
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await receive(call, into=received)
        status = {"Cancel": "CANCELLED", "deadline": "DEADLINE_EXCEEDED", "broken": "INTERNAL"}[cause]
        assert refused.value.code().name == status
    await busy.wait_until(lambda fake: fake.num_live == 0)
    await server.streams.wait_empty()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"first_token_shift": 1}, "the replica sent token 1 of beam 0, not 0"),
        ({"likely": None}, "the replica sent logprobs of 1 tokens: 4 were asked for"),
    ],
)
async def test_a_wrong_answer_is_an_error(
    fakes: list[FakeScheduler], router: tuple[RouterServer, InferenceStub], fault: dict[str, Any], words: str
) -> None:
    for fake in fakes:
        vars(fake).update(fault)
    with pytest.raises(grpc.aio.AioRpcError, match=words) as refused:
        await receive(router[1].Generate(request()))
    assert refused.value.code() is grpc.StatusCode.INTERNAL


# --- Limits


@pytest.mark.usefixtures("paused")
async def test_a_search_counts_as_its_beams(fakes: list[FakeScheduler]) -> None:
    async with running_router([fake.address for fake in fakes], max_streams=6) as (server, stub):
        await server.wait_ready()
        call = stub.Generate(request())
        received, _ = await begun(fakes, call)
        with pytest.raises(grpc.aio.AioRpcError, match="max_streams=6") as refused:
            await stub.GenerateUnary(request())
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        # Two more fit.
        small = asyncio.create_task(receive(stub.Generate(request(2))))
        with pytest.raises(grpc.aio.AioRpcError, match="a search counts as so many streams") as never:
            await stub.GenerateUnary(request(7))
        assert never.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        for fake in fakes:
            await fake.resume_steps()
        await small
        assert outputs_of(await receive(call, into=received)) == best_outputs()


async def test_each_beam_counts_against_tokens_per_minute(fakes: list[FakeScheduler], tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("keys: [{name: a, key: a-key-0123456789abcdef, tokens_per_minute: 44}]")
    path.chmod(0o600)
    as_a = (("authorization", "Bearer a-key-0123456789abcdef"),)
    async with running_router([fake.address for fake in fakes], api_keys_file=str(path)) as (server, stub):
        await server.wait_ready()
        # The prompt's 3 tokens, one of the first step, and 4 of each of 11 more: 48. The one output has 12.
        await receive(stub.Generate(request(n=1), metadata=as_a))
        with pytest.raises(grpc.aio.AioRpcError, match="tokens_per_minute=44 are used up"):
            await stub.GenerateUnary(request(n=1), metadata=as_a)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"beam_search": {"width": 0}}, "beam_search.width=0: use 1 to 32"),
        ({"beam_search": {"width": 33}}, "beam_search.width=33: use 1 to 32"),
        (
            {"beam_search": {"width": 2, "length_penalty": -10.5}},
            "beam_search.length_penalty=-10.5: use a number",
        ),
        ({"beam_search": {"width": 2, "length_penalty": float("nan")}}, "beam_search.length_penalty=nan"),
        ({"sampling": {"n": 3}}, "sampling.n=3: use at most beam_search.width, which is 2"),
        ({"sampling": {"stop": ["a"]}}, "sampling.stop is set: .* use stop_token_ids"),
        ({"sampling": {"logit_bias": {5: 1}}}, "sampling.logit_bias is set"),
        ({"sampling": {"allowed_token_ids": [5]}}, "sampling.allowed_token_ids is set"),
        ({"sampling": {"bad_words": ["a"]}}, "sampling.bad_words is set"),
        ({"sampling": {"presence_penalty": 1}}, "sampling.presence_penalty=1: a beam search ranks"),
        ({"sampling": {"repetition_penalty": 1.5}}, "sampling.repetition_penalty=1.5: .* use 1, or"),
        ({"sampling": {"prompt_logprobs": 0}}, "sampling.prompt_logprobs=0: "),
        ({"beam_search": {"width": 32}, "sampling": {"max_tokens": 3126}}, "sampling.max_tokens=3126 .* at most 3125"),
    ],
)
async def test_bad_input_is_named(tmp_path: Path, wrong: dict[str, Any], words: str) -> None:
    fake = FakeScheduler(socket_address(tmp_path, "long"), model=model_info(max_model_len=8192))
    async with running_schedulers(fake), running_router([fake.address]) as (server, stub):
        await server.wait_ready()
        fields: dict[str, Any] = {"beam_search": {"width": 2}, **wrong}
        asked = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), **fields)
        with pytest.raises(grpc.aio.AioRpcError, match=words) as refused:
            await stub.GenerateUnary(asked)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert not fake.submitted


async def test_a_search_is_computed_beside_others(router: tuple[RouterServer, InferenceStub]) -> None:
    results = await asyncio.gather(*(router[1].GenerateUnary(request()) for _ in range(20)))
    assert [[list(choice.token_ids) for choice in result.choices] for result in results] == [best_outputs()] * 20


# --- HTTP


@pytest.fixture
async def http(router: tuple[RouterServer, InferenceStub]) -> AsyncIterator[httpx.AsyncClient]:
    server, _ = router
    serving = GatewayServer(
        Gateway(server.intake, server.registry, server.readiness, max_body_bytes=10_000), "127.0.0.1", 0
    )
    serving.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{serving.port}/v1") as client:
        yield client
    await serving.stop()


BODY = {
    "use_beam_search": True,
    "n": WIDTH,
    "max_tokens": MAX_TOKENS,
    "stop_token_ids": [END],
    "return_token_ids": True,
}


async def test_a_completion(http: httpx.AsyncClient) -> None:
    expected = best_outputs(end_ids=[END, EOS])
    answer = (
        await http.post("/completions", json={"prompt": PROMPT, "logprobs": 1, "temperature": 0.7, **BODY})
    ).json()
    assert [choice["token_ids"] for choice in answer["choices"]] == expected
    for choice, token_ids in zip(answer["choices"], expected, strict=True):
        ended = token_ids[-1] == END
        assert (choice["finish_reason"], choice["stop_reason"]) == (("stop", END) if ended else ("length", None))
        assert len(choice["logprobs"]["token_logprobs"]) == len(token_ids)
    assert answer["usage"]["completion_tokens"] == sum(map(len, expected))

    more = (await http.post("/completions", json={"prompt": [PROMPT, PROMPT], **BODY, "n": 1, "best_of": WIDTH})).json()
    assert [choice["token_ids"] for choice in more["choices"]] == [expected[0]] * 2

    shown = {"prompt": PROMPT, **BODY, "include_stop_str_in_output": True, "echo": True}
    texts = [choice["text"] for choice in (await http.post("/completions", json=shown)).json()["choices"]]
    assert texts == [TOKENS.decode([*PROMPT, *token_ids], skip_special_tokens=True) for token_ids in expected]


async def test_a_chats_stream_comes_at_the_end(http: httpx.AsyncClient) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], **BODY}
    whole = (await http.post("/chat/completions", json=body)).json()
    streamed = await http.post("/chat/completions", json={**body, "stream": True})
    events = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    token_ids: list[list[int]] = [[] for _ in range(WIDTH)]
    for event in map(json.loads, events):
        (choice,) = event["choices"]
        token_ids[choice["index"]] += choice["token_ids"]
    assert token_ids == [choice["token_ids"] for choice in whole["choices"]]
    assert len(set(map(tuple, token_ids))) == WIDTH
