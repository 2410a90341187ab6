"""A scheduler that is short of KV blocks, plans steps ahead and gets cancels at any time, over real sockets."""

import asyncio
import random
import statistics
import threading
import time
from pathlib import Path

import pytest

from protos import inference_pb2, step_pb2
from scheduler.core.messages import CoreLoad, Plan
from scheduler.ranks.step_wire import StepCodec
from tests.fakes.hash_runner import HashModel
from tests.support.scheduler.scheduling import Gate, RouterEnd, make_options, running_scheduler, running_worker

PROMPT = list(range(20, 60))


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
async def test_preempted_sequences_say_the_same_and_the_log_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: str, steps: int
):
    model = HashModel(num_blocks=20)
    options = make_options(tmp_path, preemption_mode=mode, max_steps_in_flight=steps)
    async with (
        running_scheduler(options) as server,
        running_worker(options, model=model),
        RouterEnd(server.address) as router,
    ):
        groups = [await router.submit([30 + i, *PROMPT], max_tokens=60, prompt_logprobs=0) for i in range(6)]
        for i, group in enumerate(groups):
            await router.finish(group)
            assert router.tokens[group, 0] == model.generate([30 + i, *PROMPT], 60)
            frames = router.prompt_logprobs[group, 0]
            assert [entry.chosen.token_id for frame in frames for entry in frame.logprobs] == PROMPT
        await router.wait_idle()
        stats, registry = server.step_loop.status.stats, server.step_loop.metrics.registry
        assert stats.num_preemptions > 0
        assert bool(stats.num_swaps) == bool(stats.num_blocks_swapped_in) == (mode == "swap")
        assert registry.get_sample_value("octavo_num_swaps_total") == stats.num_swaps
        by_reason = "octavo_preemptions_by_reason_total"
        assert registry.get_sample_value(by_reason, {"reason": "no_blocks"}) == stats.num_preemptions
        assert registry.get_sample_value(by_reason, {"reason": "workers_lost"}) == 0
        assert registry.get_sample_value("octavo_swap_space_usage_ratio") == 0
    warnings = [record.getMessage() for record in caplog.records if "preempted" in record.getMessage()]
    assert f"PreemptionMode.{mode.upper()} mode because there is not enough KV cache space" in warnings[0]
    assert warnings[0].endswith("total_cumulative_preemption_cnt=1")


async def test_steps_are_planned_ahead_of_their_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gate, options = Gate(first=3), make_options(tmp_path, max_steps_in_flight=4)
    sixth_is_planned, encode = threading.Event(), StepCodec.encode

    def watch(codec: StepCodec, plan: Plan) -> bytes:
        if plan.step == 6:
            sixth_is_planned.set()
        return encode(codec, plan)

    monkeypatch.setattr(StepCodec, "encode", watch)
    async with (
        running_scheduler(options) as server,
        running_worker(options, before_step=gate) as worker,
        RouterEnd(server.address) as router,
    ):
        group = await router.submit(PROMPT, max_tokens=40)
        await asyncio.to_thread(gate.reached.wait)
        # The worker has returned two steps and computes the third; three more are queued.
        assert await asyncio.to_thread(sixth_is_planned.wait, 60)
        assert worker.runner.num_steps == 2
        assert len(router.tokens[group, 0]) <= 2
        gate.open()
        await router.finish(group)
        assert router.tokens[group, 0] == HashModel().generate(PROMPT, 40)


async def test_a_step_behind_a_long_one_is_planned_when_that_one_is_nearly_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    planned, begun, encode = dict[int, float](), dict[int, float](), StepCodec.encode

    def watch(codec: StepCodec, plan: Plan) -> bytes:
        planned[plan.step] = time.monotonic()
        return encode(codec, plan)

    def compute(plan: step_pb2.StepPlan) -> None:
        begun[plan.step] = time.monotonic()
        time.sleep(0.1)

    monkeypatch.setattr(StepCodec, "encode", watch)
    options = make_options(tmp_path)
    async with (
        running_scheduler(options) as server,
        running_worker(options, before_step=compute),
        RouterEnd(server.address) as router,
    ):
        group = await router.submit(PROMPT, max_tokens=16)
        await router.finish(group)
        assert router.tokens[group, 0] == HashModel().generate(PROMPT, 16)
    # After a few steps the scheduler knows how long they take. A busy machine may delay a plan; none comes early.
    after = [planned[step] - begun[step - 1] for step in range(8, 17)]
    assert statistics.median(after) > 0.05


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_steps_in_flight": 2},
        {"max_steps_in_flight": 3, "preemption_mode": "swap", "scheduling_policy": "deadline"},
        {"max_steps_in_flight": 2, "enable_chunked_prefill": False, "max_num_batched_tokens": 96},
    ],
)
async def test_two_hundred_sequences_with_random_cancels_leak_nothing(tmp_path: Path, changes: dict):
    rng, model = random.Random(2), HashModel(num_blocks=60, eos_every=30)
    options = make_options(tmp_path, **changes)
    async with (
        running_scheduler(options) as server,
        running_worker(options, model=model),
        RouterEnd(server.address) as router,
        RouterEnd(server.address) as lost,
    ):
        prompts: dict[int, list[int]] = {}
        for i in range(200):
            prompt = PROMPT[: rng.randrange(1, 40)] + [rng.randrange(20, 900) for _ in range(rng.randrange(30))]
            if i % 10 == 9:
                await lost.submit(prompt, max_tokens=50)
                continue
            deadline = rng.choice([0.0, 0.0, 0.0, 0.05])
            group = await router.submit(prompt, max_tokens=rng.randrange(1, 40), seed=i, deadline=deadline)
            prompts[group] = prompt
            if rng.random() < 0.4:
                await router.cancel(rng.choice(list(prompts)))
        await lost.close()
        for group, prompt in prompts.items():
            finish = await router.finish(group)
            seed = int(group) - 1 + (int(group) - 1) // 9
            tokens = router.tokens[group, 0]
            assert tokens == model.generate(prompt, len(tokens), seed=seed)
            assert finish.reason != inference_pb2.FINISH_REASON_ERROR
        await router.wait_for(lambda: router.loads[-1].num_running + router.loads[-1].num_waiting == 0)
        load = router.loads[-1]
        assert (load.num_free_blocks, load.num_queued_tokens) == (load.num_blocks, 0)
    # The step loop has ended, so its core can be inspected.
    core = server.step_loop.core
    assert core is not None
    core.check_integrity()
    assert core.load == CoreLoad(
        num_running=0,
        num_waiting=0,
        num_free_blocks=60,
        num_blocks=60,
        num_queued_tokens=0,
        num_free_swap_blocks=model.num_swap_blocks if "preemption_mode" in changes else 0,
    )
