"""The scheduler, in this process, over real sockets: gRPC to a router's end, ZeroMQ to a worker of hashes."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from configs import features
from protos import inference_pb2, scheduler_pb2
from protos.scheduler_pb2_grpc import SchedulerStub
from runtime.wire import PROTOCOL_VERSION
from tests.fakes.hash_runner import BAD_TOKEN, HashModel
from tests.support.scheduler.scheduling import Gate, RouterEnd, make_options, running_scheduler, running_worker

PROMPT = list(range(20, 60))


async def test_a_session_from_open_to_idle(tmp_path: Path):
    options, model = make_options(tmp_path), HashModel()
    async with running_scheduler(options) as server, running_worker(options), RouterEnd(server.address) as router:
        group = await router.submit(PROMPT, max_tokens=16, seed=5)
        finish = await router.finish(group)
        assert finish.reason == inference_pb2.FINISH_REASON_LENGTH
        assert router.tokens[group, 0] == model.generate(PROMPT, 16, seed=5)
        welcome = router.welcomes[0]
        assert (welcome.protocol_version, welcome.replica_id) == (PROTOCOL_VERSION, "0")
        assert (welcome.model.name, welcome.model.num_blocks) == ("hashes", 128)
        assert set(welcome.features) == features.OF_WORKERS | features.OF_SCHEDULERS
        assert welcome.max_logprobs == 20
        load = await router.wait_idle()
        assert (load.num_free_blocks, load.num_blocks, load.num_queued_tokens) == (128, 128, 0)
        # The prompt, then 15 of the 16 tokens, one a step: nothing computes the last one.
        assert (load.step_tokens, load.step_context_tokens) == (40 + 15, 40 + sum(range(41, 56)))
        assert load.step_seconds > 0
        # The same prompt again finds its full blocks.
        again = await router.submit(PROMPT, max_tokens=1)
        assert (await router.finish(again)).num_cached_tokens == 32
        # last_step grows, which tells a router that the replica makes progress.
        assert 0 < load.last_step < router.loads[-1].last_step


async def test_a_session_waits_for_workers(tmp_path: Path):
    options = make_options(tmp_path)
    async with running_scheduler(options) as server, RouterEnd(server.address) as router:
        assert server.step_loop.status.health[0] is False
        async with running_worker(options):
            await router.wait_for(lambda: router.welcomes and router.loads)
            assert router.loads[0].workers_ready
            assert server.step_loop.status.health[0] is True


async def test_choices_share_a_prompt_and_end_on_their_own(tmp_path: Path):
    options, model = make_options(tmp_path), HashModel(eos_every=12)
    async with (
        running_scheduler(options) as server,
        running_worker(options, model=model),
        RouterEnd(server.address) as router,
    ):
        group = await router.submit(PROMPT, max_tokens=40, choices=range(6))
        for choice in range(6):
            finish, expected = await router.finish(group, choice), model.generate(PROMPT, 40, choice=choice)
            assert router.tokens[group, choice] == expected
            stopped = expected[-1] == model.eos_token_id
            assert finish.reason == (
                inference_pb2.FINISH_REASON_STOP if stopped else inference_pb2.FINISH_REASON_LENGTH
            )
            assert not finish.HasField("stop_token_id")


async def test_a_stop_token_is_named(tmp_path: Path):
    options = make_options(tmp_path)
    stop = HashModel().generate(PROMPT, 4)[-1]
    async with running_scheduler(options) as server, running_worker(options), RouterEnd(server.address) as router:
        group = await router.submit(PROMPT, max_tokens=16, stop_token_ids=[stop])
        finish = await router.finish(group)
        assert (finish.reason, finish.stop_token_id) == (inference_pb2.FINISH_REASON_STOP, stop)


async def test_a_resumed_choice_goes_on_and_one_that_was_finished_ends(tmp_path: Path):
    options = make_options(tmp_path)
    expected = HashModel().generate(PROMPT, 12, seed=3)
    async with running_scheduler(options) as server, running_worker(options), RouterEnd(server.address) as router:
        group = await router.submit(PROMPT, max_tokens=12, seed=3, choices=[(0, expected[:7]), (1, expected)])
        await router.finish(group, 0)
        assert router.tokens[group, 0] == expected
        assert (await router.finish(group, 1)).reason == inference_pb2.FINISH_REASON_LENGTH


async def test_a_long_prompt_in_parts(tmp_path: Path):
    options, model = make_options(tmp_path), HashModel(max_model_len=4096, num_blocks=600)
    prompt = [20 + i % 900 for i in range(3000)]
    async with (
        running_scheduler(options) as server,
        running_worker(options, model=model),
        RouterEnd(server.address) as router,
    ):
        group = await router.submit(prompt, max_tokens=4, part=1000)
        # A long prompt does not delay others, and a cancel can come between its parts.
        other = await router.submit(PROMPT, max_tokens=4)
        await router.finish(other)
        doomed = await router.submit(prompt, max_tokens=4, choices=[0, 1], part=10)
        await router.cancel(doomed, reason=scheduler_pb2.CANCEL_REASON_DEADLINE)
        for choice in (0, 1):
            finish = await router.finish(doomed, choice)
            assert finish.cancel_reason == scheduler_pb2.CANCEL_REASON_DEADLINE
        await router.send_part(doomed, prompt[10:])
        await router.send_part(group, prompt[1000:2000])
        await router.send_part(group, prompt[2000:])
        await router.finish(group)
        assert router.tokens[group, 0] == model.generate(prompt, 4)


async def test_logprobs_come_with_their_tokens_and_prompt_logprobs_before_them(tmp_path: Path):
    options, model = make_options(tmp_path, max_num_batched_tokens=16), HashModel()
    async with running_scheduler(options) as server, running_worker(options), RouterEnd(server.address) as router:
        groups = [
            await router.submit(PROMPT, max_tokens=9, logprobs=2, choices=[0, 1], prompt_logprobs=1),
            await router.submit(PROMPT, max_tokens=9, seed=1),
            await router.submit(PROMPT, max_tokens=9, seed=2, logprobs=0),
        ]
        for group in groups:
            await router.finish(group)
        await router.finish(groups[0], 1)
        for choice in (0, 1):
            tokens = model.generate(PROMPT, 9, choice=choice)
            assert [entry.chosen.token_id for entry in router.logprobs[groups[0], choice]] == tokens
        assert len(router.logprobs[groups[0], 0][0].top) == 2
        assert len(router.logprobs[groups[2], 0]) == 9
        # Only the first choice has them, from position 1, without a gap, though the prompt took three steps.
        assert (groups[0], 1) not in router.prompt_logprobs
        frames = router.prompt_logprobs[groups[0], 0]
        assert len(frames) > 1
        assert frames[0].first_position == 1
        assert [entry.chosen.token_id for frame in frames for entry in frame.logprobs] == PROMPT[1:]


async def test_logits_that_are_not_finite_end_one_sequence(tmp_path: Path):
    options = make_options(tmp_path)
    async with running_scheduler(options) as server, running_worker(options), RouterEnd(server.address) as router:
        bad = await router.submit([*PROMPT, BAD_TOKEN], max_tokens=4)
        good = await router.submit(PROMPT, max_tokens=4)
        finish = await router.finish(bad)
        assert finish.reason == inference_pb2.FINISH_REASON_ERROR
        assert "not finite" in finish.message
        assert (await router.finish(good)).reason == inference_pb2.FINISH_REASON_LENGTH


async def test_a_cancel_frees_blocks_within_a_step(tmp_path: Path):
    gate, options = Gate(first=4), make_options(tmp_path)
    async with (
        running_scheduler(options) as server,
        running_worker(options, before_step=gate),
        RouterEnd(server.address) as router,
    ):
        group = await router.submit(PROMPT, max_tokens=200, choices=[0, 1])
        await asyncio.to_thread(gate.reached.wait)
        # The step in flight has not returned yet.
        await router.cancel(group, 0, reason=scheduler_pb2.CANCEL_REASON_STOP)
        finish = await router.finish(group, 0)
        assert finish.reason == inference_pb2.FINISH_REASON_CANCELLED
        assert finish.cancel_reason == scheduler_pb2.CANCEL_REASON_STOP
        await router.cancel(group)
        await router.finish(group, 1)
        load = await router.wait_idle()
        assert load.num_free_blocks == load.num_blocks
        gate.open()


async def test_a_lost_session_cancels_its_sequences(tmp_path: Path):
    gate, options = Gate(first=3), make_options(tmp_path)
    async with (
        running_scheduler(options) as server,
        running_worker(options, before_step=gate),
        RouterEnd(server.address) as watcher,
    ):
        async with RouterEnd(server.address) as lost:
            await lost.submit(PROMPT, max_tokens=200)
            await asyncio.to_thread(gate.reached.wait)
            await watcher.wait_for(lambda: watcher.loads and watcher.loads[-1].num_running == 1)
        load = await watcher.wait_idle()
        assert load.num_free_blocks == load.num_blocks
        gate.open()


async def test_attempts_of_a_request_over_sessions(tmp_path: Path):
    gate, options = Gate(first=2), make_options(tmp_path)
    async with (
        running_scheduler(options) as server,
        running_worker(options, before_step=gate),
        RouterEnd(server.address) as one,
        RouterEnd(server.address) as two,
    ):
        live = await one.submit(PROMPT, max_tokens=20, request_id="r", attempt=1)
        await asyncio.to_thread(gate.reached.wait)
        equal = await two.rejection(await two.submit(PROMPT, max_tokens=20, request_id="r", attempt=1))
        assert equal.reason == scheduler_pb2.REJECT_REASON_DUPLICATE
        lower = await two.rejection(await two.submit(PROMPT, max_tokens=20, request_id="r", attempt=0))
        assert lower.reason == scheduler_pb2.REJECT_REASON_SUPERSEDED
        higher = await two.submit(PROMPT, max_tokens=20, request_id="r", attempt=2)
        finish = await one.finish(live)
        assert (finish.reason, finish.superseded) == (inference_pb2.FINISH_REASON_CANCELLED, True)
        gate.open()
        await two.finish(higher)
        assert two.tokens[higher, 0] == HashModel().generate(PROMPT, 20)
        # No attempt is live any more: the lowest is accepted again.
        await one.finish(await one.submit(PROMPT, max_tokens=2, request_id="r", attempt=0))


async def test_a_request_of_another_routers_session_is_cancelled_by_its_id(tmp_path: Path):
    gate, options = Gate(first=2), make_options(tmp_path)
    async with (
        running_scheduler(options) as server,
        running_worker(options, before_step=gate),
        RouterEnd(server.address) as router,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        stub: Any = SchedulerStub(channel)
        group = await router.submit(PROMPT, max_tokens=20, choices=range(2), request_id="r")
        await asyncio.to_thread(gate.reached.wait)
        assert not (await stub.Cancel(inference_pb2.CancelRequest(request_id="another"))).cancelled
        assert (await stub.Cancel(inference_pb2.CancelRequest(request_id="r"))).cancelled
        for choice in range(2):
            finish = await router.finish(group, choice)
            assert finish.reason == inference_pb2.FINISH_REASON_CANCELLED
            assert finish.cancel_reason == scheduler_pb2.CANCEL_REASON_REQUESTED
        assert not (await stub.Cancel(inference_pb2.CancelRequest(request_id="r"))).cancelled
        gate.open()
        await router.wait_idle()


async def test_a_deadline_cancels(tmp_path: Path):
    gate, options = Gate(first=2), make_options(tmp_path)
    async with (
        running_scheduler(options) as server,
        running_worker(options, before_step=gate),
        RouterEnd(server.address) as router,
    ):
        group = await router.submit(PROMPT, max_tokens=200, deadline=0.2)
        finish = await router.finish(group)
        assert finish.cancel_reason == scheduler_pb2.CANCEL_REASON_DEADLINE
        gate.open()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": []}, "empty"),
        ({"prompt": [20] * 512}, "at most 511"),
        ({"prompt": [20, 1000]}, "token id 1000, but vocab_size=1000"),
        ({"max_tokens": None}, "max_tokens is not set"),
        ({"max_tokens": 0}, "at least 1"),
        ({"max_tokens": 2**31}, "beyond max_model_len=512"),
        ({"min_tokens": 9}, "min_tokens=9"),
        ({"choices": [0, 0]}, "each once"),
        ({"choices": []}, "at least one"),
        ({"stop_token_ids": [5000]}, "token id 5000"),
        ({"logit_bias": {1001: 1.0}}, "token id 1001"),
        ({"deadline": float("nan")}, "timeout=nan"),
    ],
)
async def test_a_bad_submit_is_refused_and_harms_no_other(tmp_path: Path, change: dict, words: str):
    options = make_options(tmp_path)
    async with running_scheduler(options) as server, running_worker(options), RouterEnd(server.address) as router:
        good = await router.submit(PROMPT, max_tokens=8)
        submit: dict[str, Any] = {"prompt": PROMPT} | change
        rejected = await router.rejection(await router.submit(**submit))
        assert rejected.reason == scheduler_pb2.REJECT_REASON_INVALID
        assert words in rejected.message
        await router.finish(good)
        await router.wait_idle()


async def test_prompts_longer_than_declared_or_with_bad_parts_are_refused(tmp_path: Path):
    options = make_options(tmp_path)
    async with running_scheduler(options) as server, running_worker(options), RouterEnd(server.address) as router:
        long = await router.submit(PROMPT, part=10)
        await router.send_part(long, PROMPT)
        assert "hold 50 tokens already" in (await router.rejection(long)).message
        wild = await router.submit(PROMPT, part=10)
        await router.send_part(wild, [70_000])
        assert "token id 70000" in (await router.rejection(wild)).message


async def test_half_sent_prompts_take_bounded_memory(tmp_path: Path):
    options = make_options(tmp_path, max_queued_tokens=100)
    async with running_scheduler(options) as server, running_worker(options), RouterEnd(server.address) as router:
        held = [await router.submit(PROMPT, part=1) for _ in range(2)]
        rejected = await router.rejection(await router.submit(PROMPT, part=1))
        assert rejected.reason == scheduler_pb2.REJECT_REASON_QUEUE_FULL
        await router.cancel(held[0])
        await router.finish(held[0])
        # The room of the cancelled prompt is free again.
        group = await router.submit(PROMPT, part=1)
        await router.send_part(group, PROMPT[1:])
        await router.finish(group)


async def test_a_full_queue_refuses(tmp_path: Path):
    gate, options = Gate(), make_options(tmp_path, max_num_seqs=1, max_queued_requests=2)
    async with (
        running_scheduler(options) as server,
        running_worker(options, before_step=gate),
        RouterEnd(server.address) as router,
    ):
        groups = [await router.submit(PROMPT, max_tokens=2)]
        await asyncio.to_thread(gate.reached.wait)
        groups += [await router.submit(PROMPT, max_tokens=2) for _ in range(2)]
        rejected = await router.rejection(await router.submit(PROMPT))
        assert rejected.reason == scheduler_pb2.REJECT_REASON_QUEUE_FULL
        assert "max_queued_requests=2" in rejected.message
        gate.open()
        for group in groups:
            await router.finish(group)


async def test_a_more_urgent_request_takes_a_place_in_a_full_queue(
    tmp_path: Path,
):
    """The place may be that of another router's request, which is rejected with QUEUE_FULL."""
    gate = Gate()
    options = make_options(tmp_path, max_num_seqs=1, max_queued_requests=1, scheduling_policy="priority")
    async with (
        running_scheduler(options) as server,
        running_worker(options, before_step=gate),
        RouterEnd(server.address) as router,
        RouterEnd(server.address) as other,
    ):
        running = await router.submit(PROMPT, max_tokens=2, priority=9)
        await asyncio.to_thread(gate.reached.wait)
        waiting = await other.submit(PROMPT, max_tokens=2, priority=5)
        await router.wait_for(lambda: router.loads[-1].refused_priority == 5)
        urgent = await router.submit(PROMPT, max_tokens=2, priority=4)
        displaced = await other.rejection(waiting)
        assert displaced.reason == scheduler_pb2.REJECT_REASON_QUEUE_FULL
        assert "higher priority" in displaced.message
        await other.wait_for(lambda: other.loads[-1].refused_priority == 4)
        gate.open()
        for group in (running, urgent):
            await router.finish(group)
        await other.wait_for(lambda: not other.loads[-1].HasField("refused_priority"))


async def test_protocol_errors_end_the_session_that_made_them(tmp_path: Path):
    options = make_options(tmp_path)
    async with running_scheduler(options) as server, running_worker(options), RouterEnd(server.address) as good:
        await good.wait_for(lambda: good.welcomes)
        group = await good.submit(PROMPT, max_tokens=50)
        other = RouterEnd(server.address)
        await other.open(protocol_version=99)
        status, details = await other.end()
        assert status == grpc.StatusCode.FAILED_PRECONDITION
        assert "protocol_version is 99 at the router" in details
        await other.close()
        async with RouterEnd(server.address) as backwards:
            await backwards.wait_for(lambda: backwards.welcomes)
            submit = scheduler_pb2.Submit(group=0)
            await backwards.send(scheduler_pb2.RouterMessage(submit=submit))
            assert (await backwards.end())[0] == grpc.StatusCode.INVALID_ARGUMENT
        await good.finish(group)


async def test_a_router_with_too_much_waiting_for_it_is_cut_off(tmp_path: Path):
    # gRPC decides how much it buffers for a router that stopped reading; this limit is below one step's logprobs.
    options = make_options(tmp_path)
    async with (
        running_scheduler(options, session_buffer_bytes=2_000) as server,
        running_worker(options),
        RouterEnd(server.address) as watcher,
        RouterEnd(server.address) as router,
    ):
        await router.submit(PROMPT, max_tokens=400, choices=range(16), logprobs=20)
        status, details = await router.end()
        assert status == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "does not read" in details
        load = await watcher.wait_idle()
        assert load.num_free_blocks == load.num_blocks
