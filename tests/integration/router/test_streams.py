"""Streams as a client of the router gets them, over real gRPC, from fake schedulers."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc.aio
import pytest

from protos import inference_pb2 as pb
from protos import scheduler_pb2 as wire
from protos.inference_pb2_grpc import InferenceStub
from tests.fakes.routers import receive, running_router, running_schedulers, smollm2_tokenizer, socket_address
from tests.fakes.scheduler import FakeScheduler, hashed_token, model_info, scripted


@pytest.fixture
async def scheduler(tmp_path: Path) -> AsyncIterator[FakeScheduler]:
    fake = FakeScheduler(socket_address(tmp_path, "one"))
    async with running_schedulers(fake):
        yield fake


@pytest.fixture
async def client(scheduler: FakeScheduler) -> AsyncIterator[InferenceStub]:
    async with running_router([scheduler.address]) as (server, stub):
        await server.wait_ready()
        yield stub


def _request(**fields: object) -> pb.GenerateRequest:
    sampling = fields.pop("sampling", {})
    return pb.GenerateRequest(
        **({"prompt": "Once upon a time"} | fields),  # type: ignore[arg-type]
        sampling=pb.SamplingParams(**({"max_tokens": 12, "seed": 7} | sampling)),  # type: ignore[arg-type, operator]
    )


def _expected_tokens(prompt: list[int], count: int, seed: int = 7, choice: int = 0) -> list[int]:
    token_ids = list(prompt)
    while len(token_ids) < len(prompt) + count:
        token_ids.append(hashed_token(token_ids, len(prompt), seed, choice))
    return token_ids[len(prompt) :]


async def test_a_stream_has_its_start_its_tokens_and_its_usage(client: InferenceStub) -> None:
    received = await receive(client.Generate(_request(request_id="r-1")))
    tokenizer = smollm2_tokenizer()
    prompt = tokenizer.encode("Once upon a time")
    started = received.started
    assert started is not None
    assert (started.request_id, started.seed, started.attempt, started.model) == ("r-1", 7, 0, "test-model")
    assert (list(started.prompt_token_ids), started.fingerprint) == (prompt, "one")
    assert received.token_ids == {0: _expected_tokens(prompt, 12)}
    assert received.text[0] == tokenizer.decode(received.token_ids[0], skip_special_tokens=True)
    assert received.finish[0] == pb.Finish(reason=pb.FINISH_REASON_LENGTH)
    assert received.exact
    assert received.finished is not None
    assert received.finished.usage == pb.Usage(prompt_tokens=len(prompt), cached_tokens=4, completion_tokens=12)


async def test_started_leaves_nothing_to_a_default(scheduler: FakeScheduler, tmp_path: Path) -> None:
    default = pb.SamplingParams(temperature=0.5, top_k=40)
    fake = FakeScheduler(socket_address(tmp_path, "two"), model=model_info(default_sampling=default, max_model_len=64))
    async with running_schedulers(fake), running_router([fake.address]) as (server, stub):
        await server.wait_ready()
        received = await receive(stub.Generate(pb.GenerateRequest(prompt="a b", sampling=pb.SamplingParams(top_k=-1))))
        sampling = received.started.sampling
        unset = [f.name for f in sampling.DESCRIPTOR.fields if f.has_presence and not sampling.HasField(f.name)]
        optional = ["constraint", "thinking_token_budget", "reasoning_marks", "num_speculative_tokens"]
        assert unset == ["logprobs", "prompt_logprobs", "repetition_detection", *optional]
        assert (sampling.temperature, sampling.top_k, sampling.n) == (0.5, 0, 1)
        assert sampling.max_tokens == 64 - len(received.started.prompt_token_ids)
        assert 0 < sampling.seed < 2**63
        assert received.started.seed == sampling.seed
        assert fake.submitted[0].sampling == sampling


async def test_unary_says_what_the_stream_says(client: InferenceStub) -> None:
    request = _request(sampling={"n": 2, "logprobs": 1, "prompt_logprobs": 1})
    received = await receive(client.Generate(request))
    result = await client.GenerateUnary(request)
    assert {choice.index: list(choice.token_ids) for choice in result.choices} == received.token_ids
    assert {choice.index: choice.text for choice in result.choices} == received.text
    assert all(choice.finish.reason == pb.FINISH_REASON_LENGTH and choice.exact for choice in result.choices)
    assert list(result.prompt_logprobs) == received.prompt_logprobs
    assert result.usage == received.finished.usage
    assert result.started.prompt_token_ids == received.started.prompt_token_ids


async def test_three_choices_are_one_group_of_three_different_outputs(
    client: InferenceStub, scheduler: FakeScheduler
) -> None:
    received = await receive(client.Generate(_request(sampling={"n": 3})))
    prompt = list(received.started.prompt_token_ids)
    assert received.token_ids == {i: _expected_tokens(prompt, 12, choice=i) for i in range(3)}
    assert len(scheduler.submitted) == 1
    assert received.finished.usage.completion_tokens == 36


async def test_chat_and_token_ids_reach_the_scheduler_as_they_should(
    client: InferenceStub, scheduler: FakeScheduler
) -> None:
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="Hi")])
    await receive(client.Generate(pb.GenerateRequest(chat=chat, sampling=pb.SamplingParams(max_tokens=1))))
    assert scheduler.prompts[1] == smollm2_tokenizer().encode_chat(chat)
    await receive(
        client.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6]), sampling=pb.SamplingParams(max_tokens=1)))
    )
    assert scheduler.prompts[2] == [5, 6]


async def test_a_long_prompt_is_split_and_arrives_whole(tmp_path: Path) -> None:
    fake = FakeScheduler(socket_address(tmp_path, "long"), model=model_info(max_model_len=300_000))
    async with running_schedulers(fake), running_router([fake.address]) as (server, stub):
        await server.wait_ready()
        ids = [20 + i % 40_000 for i in range(250_000)]
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling=pb.SamplingParams(max_tokens=1))
        await receive(stub.Generate(request))
        assert fake.prompts[1] == ids
        assert len(fake.submitted[0].prompt_token_ids) == 100_000


@pytest.mark.parametrize("tokens_per_step", [1, 4])
@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_across_tokens_ends_the_choice_at_its_completing_token(
    client: InferenceStub, scheduler: FakeScheduler, tokens_per_step: int, include: bool
) -> None:
    tokenizer = smollm2_tokenizer()
    words = tokenizer.encode(" one two three four five six seven")
    scheduler.next_token, scheduler.tokens_per_step = scripted(words), tokens_per_step
    sampling = {"stop": ["ee fo", "absent"], "include_stop_str_in_output": include}
    received = await receive(client.Generate(_request(sampling=sampling)))
    assert received.text[0] == (" one two three fo" if include else " one two thr")
    assert received.finish[0] == pb.Finish(reason=pb.FINISH_REASON_STOP, stop_string="ee fo")
    assert received.token_ids[0] == words[:4]
    assert received.finished.usage == pb.Usage(
        prompt_tokens=len(received.started.prompt_token_ids),
        cached_tokens=4,
        completion_tokens=4,
    )
    # The client may have the whole output before the scheduler gets the cancel.
    await scheduler.wait_until(lambda fake: bool(fake.cancelled))
    assert [(c.reason, list(c.choices)) for c in scheduler.cancelled] == [(wire.CANCEL_REASON_STOP, [0])]


async def test_what_was_cut_at_a_stop_string_is_whole_though_the_step_under_way_fails(
    client: InferenceStub, scheduler: FakeScheduler
) -> None:
    words = smollm2_tokenizer().encode(" one two three four five six seven")

    def next_token(token_ids: Sequence[int], num_prompt_tokens: int, seed: int, choice: int) -> int:
        position = len(token_ids) - num_prompt_tokens
        scheduler.is_broken = position == 3
        return words[position]

    scheduler.next_token = next_token
    received = await receive(client.Generate(_request(sampling={"stop": ["ee fo"]})))
    assert received.text[0] == " one two thr"
    assert received.finished is not None


async def test_a_stop_string_holds_only_after_min_tokens(client: InferenceStub, scheduler: FakeScheduler) -> None:
    words = smollm2_tokenizer().encode(" a b a b a b")
    scheduler.next_token = scripted(words)
    received = await receive(client.Generate(_request(sampling={"stop": [" a"], "min_tokens": 4})))
    assert (received.text[0], received.token_ids[0]) == (" a b a b", words[:5])


@pytest.mark.parametrize(
    ("stop_token", "include", "text"), [(True, False, " one"), (True, True, " one two"), (False, False, " one two")]
)
async def test_eos_and_stop_tokens_are_counted_but_not_shown(
    client: InferenceStub, scheduler: FakeScheduler, stop_token: bool, include: bool, text: str
) -> None:
    words = smollm2_tokenizer().encode(" one two")
    scheduler.next_token = scripted(words)
    stop_ids = [words[1]] if stop_token else []
    sampling = {"stop_token_ids": stop_ids, "include_stop_str_in_output": include, "skip_special_tokens": False}
    received = await receive(client.Generate(_request(sampling=sampling)))
    assert received.text[0] == text
    assert received.token_ids[0] == (words if stop_token else [*words, 2])
    assert received.finish[0].reason == pb.FINISH_REASON_STOP
    assert received.finish[0].WhichOneof("stop") == ("stop_token_id" if stop_token else None)


async def test_no_chunk_holds_half_a_character(client: InferenceStub, scheduler: FakeScheduler) -> None:
    text = " 😀 日本 👩‍👩‍👧"
    words = smollm2_tokenizer().encode(text)
    scheduler.next_token = scripted(words)
    received = await receive(client.Generate(_request(sampling={"max_tokens": 100})))
    assert received.text[0] == text
    cut = await receive(client.Generate(_request(sampling={"max_tokens": 1})))
    assert cut.text[0] == smollm2_tokenizer().decode(words[:1], skip_special_tokens=True)
    assert cut.text[0].endswith("\ufffd"), "an output that ends inside a character must end with U+FFFD"


async def test_logprobs_carry_the_bytes_of_their_tokens(client: InferenceStub) -> None:
    sampling = {"logprobs": 1, "prompt_logprobs": 0, "n": 2, "max_tokens": 3}
    received = await receive(client.Generate(_request(sampling=sampling)))
    tokenizer = smollm2_tokenizer()
    assert len(received.logprobs) == 6
    assert len(received.prompt_logprobs) == len(received.started.prompt_token_ids) - 1
    for entry in [*received.logprobs, *received.prompt_logprobs]:
        assert entry.chosen.token == tokenizer.token_bytes(entry.chosen.token_id) != b""
        assert entry.top[0].token == entry.chosen.token


async def test_logprobs_of_a_cancelled_request_do_not_shift_those_of_others(
    client: InferenceStub, scheduler: FakeScheduler
) -> None:
    scheduler.step_seconds = 0.005
    first = client.Generate(_request(sampling={"logprobs": 1, "max_tokens": 200}))
    second = asyncio.create_task(
        receive(client.Generate(_request(sampling={"logprobs": 1, "max_tokens": 40, "seed": 8})))
    )
    await receive(first, until=lambda received: bool(received.token_ids))
    first.cancel()
    received = await second
    assert [entry.chosen.token_id for entry in received.logprobs] == received.token_ids[0]


async def test_cancel_ends_the_stream_and_frees_the_sequences(client: InferenceStub, scheduler: FakeScheduler) -> None:
    scheduler.pause_at = 2
    call = client.Generate(_request(request_id="c", sampling={"n": 2}))
    received = await receive(call, until=lambda received: received.started is not None)
    assert (await client.Cancel(pb.CancelRequest(request_id="c"))).cancelled
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await receive(call, into=received)
    assert caught.value.code() is grpc.StatusCode.CANCELLED
    await scheduler.wait_until(lambda fake: fake.num_live == 0)
    assert not (await client.Cancel(pb.CancelRequest(request_id="c"))).cancelled


async def test_a_client_that_goes_away_frees_its_sequences(client: InferenceStub, scheduler: FakeScheduler) -> None:
    scheduler.pause_at = 1
    call = client.Generate(_request())
    await receive(call, until=lambda received: bool(received.token_ids))
    call.cancel()
    await scheduler.wait_until(lambda fake: fake.num_live == 0)
    assert scheduler.cancelled[0].reason == wire.CANCEL_REASON_CLIENT


async def test_a_deadline_ends_the_call_and_travels_with_the_request(
    client: InferenceStub, scheduler: FakeScheduler
) -> None:
    scheduler.pause_at = 1
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await receive(client.Generate(_request(), timeout=0.3))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await scheduler.wait_until(lambda fake: fake.num_live == 0)
    # gRPC keeps deadlines on one clock and says what remains by another, so 0.3 s may read as 0.30002.
    assert 0 < scheduler.submitted[0].timeout < 0.31


async def test_a_gap_in_the_tokens_is_an_error_of_ours(client: InferenceStub, scheduler: FakeScheduler) -> None:
    scheduler.first_token_shift = 1
    with pytest.raises(grpc.aio.AioRpcError, match="misses its output tokens 0 to 0") as caught:
        await receive(client.Generate(_request()))
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    await scheduler.wait_until(lambda fake: fake.num_live == 0)


async def test_a_slow_reader_is_ended_resumable_and_others_go_on(scheduler: FakeScheduler) -> None:
    scheduler.model.max_model_len = 200_000
    scheduler.tokens_per_step = 64
    # The transport itself would buffer some MB.
    small_windows = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
    async with (
        running_router([scheduler.address], stream_buffer_bytes=4096) as (server, stub),
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=small_windows) as channel,
    ):
        await server.wait_ready()
        call = InferenceStub(channel).Generate(_request(sampling={"max_tokens": 150_000, "logprobs": 0}))
        received = await receive(call, until=lambda received: received.started is not None)
        await scheduler.wait_until(lambda fake: bool(fake.cancelled))
        assert scheduler.cancelled[0].reason == wire.CANCEL_REASON_SLOW_READER
        other = await receive(stub.Generate(_request()))
        assert len(other.token_ids[0]) == 12
        with pytest.raises(grpc.aio.AioRpcError, match="resume") as caught:
            await receive(call, into=received)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        resume = received.resume_request()
        resume.sampling.max_tokens = len(received.token_ids[0]) + 5
        prompt = list(received.begin_again().prompt_token_ids)
        rest = await receive(stub.Generate(resume), into=received)
        assert rest.token_ids[0] == _expected_tokens(prompt, resume.sampling.max_tokens)


async def test_a_client_that_never_reads_gives_its_place_back(
    scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client is alive and answers pings, so without a limit its unread data would stay for ever."""
    monkeypatch.setattr("router.streams.outbox.UNREAD_S", 0.2)
    scheduler.model.max_model_len = 200_000
    scheduler.tokens_per_step = 64
    small_windows = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
    async with (
        running_router([scheduler.address], stream_buffer_bytes=4096) as (server, _),
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=small_windows) as channel,
    ):
        await server.wait_ready()
        call = InferenceStub(channel).Generate(_request(sampling={"max_tokens": 150_000, "logprobs": 0}))
        await receive(call, until=lambda received: received.started is not None)
        await scheduler.wait_until(lambda fake: bool(fake.cancelled))
        assert server.num_streams == 1
        async with asyncio.timeout(10):
            while server.num_streams:  # noqa: ASYNC110 (there is no event to wait for)
                await asyncio.sleep(0.01)
