"""Streams that outlive their scheduler or router: the same tokens, text and finish as without the failure."""

import asyncio
from pathlib import Path

import grpc.aio
import pytest

from protos import inference_pb2 as pb
from tests.fakes.routers import Received, receive, running_router, running_schedulers, smollm2_tokenizer, socket_address
from tests.fakes.scheduler import FakeScheduler, hashed_token, model_info, scripted


def _request(**sampling: object) -> pb.GenerateRequest:
    params: dict = {"max_tokens": 30, "seed": 7, "n": 2, **sampling}
    return pb.GenerateRequest(prompt="Once upon a time", request_id="r", sampling=pb.SamplingParams(**params))


async def _undisturbed(directory: Path, request: pb.GenerateRequest, **scheduler: object) -> Received:
    fake = FakeScheduler(socket_address(directory, "undisturbed"), **scheduler)  # type: ignore[arg-type]
    async with running_schedulers(fake), running_router([fake.address]) as (server, stub):
        await server.wait_ready()
        return await receive(stub.Generate(request))


def _same_output(one: Received, other: Received) -> bool:
    return (one.token_ids, one.text, one.finish) == (other.token_ids, other.text, other.finish)


def _fakes(directory: Path, *names: str, **fields: object) -> list[FakeScheduler]:
    return [FakeScheduler(socket_address(directory, name), **fields) for name in names]  # type: ignore[arg-type]


async def _stalled(stub, request: pb.GenerateRequest, fakes: list[FakeScheduler], tokens: int):
    """Begins a call whose choices get `tokens` tokens each and then wait. Returns (call, received, its scheduler)."""
    call = stub.Generate(request)
    choices = max(request.sampling.n, 1)
    received = await receive(
        call, until=lambda r: len(r.token_ids) == choices and all(len(ids) == tokens for ids in r.token_ids.values())
    )
    return call, received, next(fake for fake in fakes if fake.num_live)


async def test_a_schedulers_death_changes_nothing_in_a_stream(tmp_path: Path) -> None:
    want = await _undisturbed(tmp_path, _request())
    fakes = _fakes(tmp_path, "a", "b", pause_at=9)
    async with running_schedulers(*fakes), running_router([f.address for f in fakes]) as (server, stub):
        await server.wait_ready()
        call, received, holder = await _stalled(stub, _request(), fakes, 9)
        other = next(fake for fake in fakes if fake is not holder)
        other.pause_at = None
        await holder.kill()
        received = await receive(call, into=received)
    assert _same_output(received, want)
    assert received.exact
    assert received.finished == want.finished
    moved = other.submitted[-1]
    assert (moved.attempt, [len(start.output_token_ids) for start in moved.choices]) == (1, [9, 9])
    assert server.metrics.registry.get_sample_value("octavo_resubmissions_total") == 1
    assert server.metrics.registry.get_sample_value("octavo_inexact_resumes_total") == 0


async def test_choices_that_have_ended_are_not_computed_again(tmp_path: Path) -> None:
    def ends_early(ids, num_prompt_tokens: int, seed: int, choice: int) -> int:
        return (
            2
            if choice == 0 and len(ids) - num_prompt_tokens == 3
            else hashed_token(ids, num_prompt_tokens, seed, choice)
        )

    want = await _undisturbed(tmp_path, _request(), next_token=ends_early)
    fakes = _fakes(tmp_path, "a", "b", pause_at=9, next_token=ends_early)
    async with running_schedulers(*fakes), running_router([f.address for f in fakes]) as (server, stub):
        await server.wait_ready()
        call = stub.Generate(_request())
        received = await receive(call, until=lambda r: 0 in r.finish and len(r.token_ids.get(1, [])) == 9)
        holder, other = sorted(fakes, key=lambda fake: -fake.num_live)
        other.pause_at = None
        await holder.kill()
        received = await receive(call, into=received)
    assert _same_output(received, want)
    assert [start.choice for start in other.submitted[-1].choices] == [1]


async def test_an_equal_fingerprint_is_preferred_and_another_one_is_said(tmp_path: Path) -> None:
    fakes = _fakes(tmp_path, "a", "b", "c", pause_at=5)
    fakes[2].model = model_info(fingerprint="two")
    async with running_schedulers(*fakes), running_router([f.address for f in fakes]) as (server, stub):
        await server.wait_ready()
        request = _request(n=1)
        while True:
            call, received, holder = await _stalled(stub, request, fakes, 5)
            if holder is not fakes[2]:
                break
            call.cancel()
            await fakes[2].wait_until(lambda fake: fake.num_live == 0)
        twin = fakes[1] if holder is fakes[0] else fakes[0]
        twin.pause_at = 8
        await holder.kill()
        received = await receive(call, into=received, until=lambda r: len(r.token_ids[0]) == 8)
        assert received.exact
        assert twin.num_live == 1
        fakes[2].pause_at = None
        await twin.kill()
        received = await receive(call, into=received)
    assert not received.exact
    assert received.finished is not None
    assert server.metrics.registry.get_sample_value("octavo_inexact_resumes_total") == 1


async def test_a_scheduler_that_comes_back_goes_on_with_its_streams(tmp_path: Path) -> None:
    want = await _undisturbed(tmp_path, _request())
    (fake,) = _fakes(tmp_path, "a", pause_at=4)
    async with running_schedulers(fake), running_router([fake.address]) as (server, stub):
        await server.wait_ready()
        call, received, _ = await _stalled(stub, _request(), [fake], 4)
        await fake.kill()
        fake.pause_at = None
        await fake.start()
        received = await receive(call, into=received)
    assert _same_output(received, want)


async def test_a_request_its_replica_gives_up_goes_on_elsewhere(tmp_path: Path) -> None:
    """A scheduler does this with sequences that still run when its drain ends."""
    want = await _undisturbed(tmp_path, _request(n=1))
    fakes = _fakes(tmp_path, "a", "b", pause_at=6)
    async with running_schedulers(*fakes), running_router([f.address for f in fakes]) as (server, stub):
        await server.wait_ready()
        call, received, holder = await _stalled(stub, _request(n=1), fakes, 6)
        other = next(fake for fake in fakes if fake is not holder)
        holder.draining, other.pause_at = True, None
        holder.send_load()
        holder.give_up_all()
        received = await receive(call, into=received)
    assert _same_output(received, want)


async def test_a_client_goes_on_at_another_router(tmp_path: Path) -> None:
    want = await _undisturbed(tmp_path, _request(stop=["absent"]))
    (fake,) = _fakes(tmp_path, "a", pause_at=11)
    async with running_schedulers(fake):
        async with running_router([fake.address]) as (server, stub):
            await server.wait_ready()
            _, received, _ = await _stalled(stub, _request(stop=["absent"]), [fake], 11)
        fake.pause_at = None
        async with running_router([fake.address]) as (server, stub):
            await server.wait_ready()
            resume = received.resume_request()
            received.begin_again()
            received = await receive(stub.Generate(resume), into=received)
    assert _same_output(received, want)
    assert received.started is not None
    assert (received.started.attempt, received.started.seed) == (1, 7)
    assert received.finished.usage.completion_tokens == 60
    assert received.exact


async def test_a_resume_on_another_fingerprint_says_so(tmp_path: Path) -> None:
    (fake,) = _fakes(tmp_path, "a")
    async with running_schedulers(fake), running_router([fake.address]) as (server, stub):
        await server.wait_ready()
        received = await receive(stub.Generate(_request(n=1)))
        resume = received.resume_request()
        resume.resume.choices[0].finished = False
        del resume.resume.choices[0].output_token_ids[10:]
        resume.resume.choices[0].text_bytes_delivered = 0
        resume.resume.fingerprint = "another"
        again = await receive(stub.Generate(resume), into=_from_token(10))
        assert not again.exact


def _from_token(count: int) -> Received:
    """Expects a stream that begins after `count` tokens of choice 0."""
    received = Received()
    received.token_ids[0] = [0] * count
    return received


@pytest.mark.parametrize("held", range(7))
async def test_every_point_of_a_stream_resumes_to_the_same_text_and_stop(tmp_path: Path, held: int) -> None:
    """Held-back text, partial characters and a partial stop string are all rebuilt from the tokens."""
    tokenizer = smollm2_tokenizer()
    words = tokenizer.encode(" 😀 one two three")
    request = _request(n=1, stop=["wo th"])
    whole = await _undisturbed(tmp_path, request, next_token=scripted(words))
    (fake,) = _fakes(tmp_path, "a", next_token=scripted(words), pause_at=held)
    async with running_schedulers(fake), running_router([fake.address]) as (server, stub):
        await server.wait_ready()
        call = stub.Generate(request)
        received = await receive(
            call,
            until=lambda r: r.started is not None if not held else len(r.token_ids.get(0, [])) >= held or 0 in r.finish,
        )
        resume = received.resume_request()
        fake.pause_at = None
        received.begin_again()
        received = await receive(stub.Generate(resume), into=received)
    assert received.text[0] == whole.text[0] == " 😀 one t"
    assert received.finish == whole.finish
    assert received.token_ids == whole.token_ids


@pytest.mark.parametrize(
    ("tokens", "sampling", "finish"),
    [
        (" one two", {"stop": ["ne tw"]}, pb.Finish(reason=pb.FINISH_REASON_STOP, stop_string="ne tw")),
        (" one two", {"max_tokens": 2}, pb.Finish(reason=pb.FINISH_REASON_LENGTH)),
        (" one two<|im_end|>", {}, pb.Finish(reason=pb.FINISH_REASON_STOP)),
    ],
)
async def test_a_complete_output_gets_its_finish_without_computing(
    tmp_path: Path, tokens: str, sampling: dict, finish: pb.Finish
) -> None:
    (fake,) = _fakes(tmp_path, "a")
    ids = smollm2_tokenizer().encode(tokens)
    async with running_schedulers(fake), running_router([fake.address]) as (server, stub):
        await server.wait_ready()
        request = _request(**{"n": 1, **sampling})
        request.ClearField("prompt")
        choice = pb.ResumeChoice(index=0, output_token_ids=ids, text_bytes_delivered=len(" o"))
        request.resume.CopyFrom(pb.Resume(attempt=3, prompt_token_ids=[5, 6], choices=[choice], fingerprint="one"))
        received = _from_token(len(ids))
        received.text[0] = " o"
        received = await receive(stub.Generate(request), into=received)
    assert received.finish[0] == finish
    assert received.text[0] == (" o" if "stop" in sampling else " one two")
    assert received.finished.usage == pb.Usage(prompt_tokens=2, completion_tokens=len(ids))
    assert fake.submitted == []


async def test_a_higher_attempt_takes_over_and_lower_ones_are_turned_away(tmp_path: Path) -> None:
    (fake,) = _fakes(tmp_path, "a", pause_at=3)
    async with running_schedulers(fake), running_router([fake.address]) as (server, stub):
        await server.wait_ready()
        first, received, _ = await _stalled(stub, _request(), [fake], 3)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await receive(stub.Generate(_request()))
        assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
        resume = received.resume_request()
        resume.resume.attempt = 2
        second = stub.Generate(resume)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await receive(first, into=received)
        assert caught.value.code() is grpc.StatusCode.ABORTED
        await receive(second, until=lambda r: r.started is not None)
        for attempt, status in ((2, grpc.StatusCode.ALREADY_EXISTS), (1, grpc.StatusCode.ABORTED)):
            resume.resume.attempt = attempt
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await receive(stub.Generate(resume))
            assert caught.value.code() is status
        await fake.resume_steps()
        rest = _from_token(3)
        rest.token_ids[1] = [0] * 3
        rest.started = pb.Started()
        await receive(second, into=rest)
        assert rest.finished is not None
        assert fake.submitted[-1].attempt == 2 << 16


async def test_prompt_logprobs_come_once(tmp_path: Path) -> None:
    want = await _undisturbed(tmp_path, _request(n=1, prompt_logprobs=1))
    fakes = _fakes(tmp_path, "a", "b", pause_at=2)
    async with running_schedulers(*fakes), running_router([f.address for f in fakes]) as (server, stub):
        await server.wait_ready()
        call, received, holder = await _stalled(stub, _request(n=1, prompt_logprobs=1), fakes, 2)
        other = next(fake for fake in fakes if fake is not holder)
        other.pause_at = None
        await holder.kill()
        received = await receive(call, into=received)
    assert received.prompt_logprobs == want.prompt_logprobs
    assert not other.submitted[-1].sampling.HasField("prompt_logprobs")


async def test_a_full_queue_is_tried_elsewhere_once(tmp_path: Path) -> None:
    fakes = _fakes(tmp_path, "a", "b", "c", capacity=0)
    fakes[1].capacity = None
    async with running_schedulers(*fakes), running_router([fakes[0].address, fakes[1].address]) as (server, stub):
        await server.wait_ready()
        for _ in range(4):
            assert (await receive(stub.Generate(_request()))).finished is not None
    async with running_schedulers(*fakes), running_router([fakes[0].address, fakes[2].address]) as (server, stub):
        await server.wait_ready()
        with pytest.raises(grpc.aio.AioRpcError, match="QUEUE_FULL") as caught:
            await receive(stub.Generate(_request()))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_new_requests_avoid_a_draining_scheduler_and_spread_over_the_others(tmp_path: Path) -> None:
    fakes = _fakes(tmp_path, "a", "b", "c", pause_at=1)
    async with running_schedulers(*fakes), running_router([f.address for f in fakes]) as (server, stub):
        await server.wait_ready()
        # Without a Load: the router can also learn of the drain from a rejection.
        fakes[0].draining = True
        calls = []
        for i in range(6):
            request = _request(n=1)
            request.request_id = f"r{i}"
            calls.append(stub.Generate(request))
            await receive(calls[-1], until=lambda r: bool(r.token_ids))
        assert [fake.num_live for fake in fakes] == [0, 3, 3]
        for call in calls:
            call.cancel()
        await asyncio.gather(*(fake.wait_until(lambda fake: fake.num_live == 0) for fake in fakes))


async def test_a_scheduler_of_another_model_or_protocol_is_not_used(tmp_path: Path) -> None:
    (fake,) = _fakes(tmp_path, "a", model=model_info(name="other"))
    async with running_schedulers(fake), running_router([fake.address]) as (server, stub):
        async with asyncio.timeout(10):
            # The server has no event for a refused Session.
            while "serves 'other'" not in server.readiness()[1]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        with pytest.raises(grpc.aio.AioRpcError, match="same model options") as caught:
            await stub.GetModel(pb.GetModelRequest())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_silent_scheduler_counts_as_dead(tmp_path: Path) -> None:
    fakes = _fakes(tmp_path, "a", "b", pause_at=3)
    async with (
        running_schedulers(*fakes),
        running_router([f.address for f in fakes], heartbeat_timeout=1.0) as (server, stub),
    ):
        await server.wait_ready()
        call, received, holder = await _stalled(stub, _request(n=1), fakes, 3)
        holder.silent = True
        other = next(fake for fake in fakes if fake is not holder)
        other.pause_at = None
        received = await receive(call, into=received)
        assert received.finished is not None
        assert [len(start.output_token_ids) for start in other.submitted[-1].choices] == [3]
