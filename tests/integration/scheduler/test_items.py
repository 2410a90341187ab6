"""Items over real sockets: from a router's parts through the scheduler to the ranks that encode."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from configs.options import Options
from protos import scheduler_pb2
from tests.fakes.encoder import BAD_FILE
from tests.fakes.hash_runner import HashModel
from tests.fakes.worker import FakeWorker
from tests.support.scheduler.items import item, prompt_with
from tests.support.scheduler.scheduling import Gate, RouterEnd, make_options, running_scheduler, running_worker

MODEL = HashModel(encoder_cache_size=40)


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return make_options(tmp_path, max_num_encoder_input_tokens=16)


@contextlib.asynccontextmanager
async def serving(options: Options, model: HashModel) -> AsyncIterator[tuple[RouterEnd, FakeWorker]]:
    async with (
        running_scheduler(options) as scheduler,
        running_worker(options, model=model) as worker,
        RouterEnd(scheduler.address) as router,
    ):
        yield router, worker


async def test_an_item_is_sent_to_the_worker_and_encoded_once_for_all_requests(options: Options):
    span, data = item(b"a picture" * 100, 8)
    async with serving(options, MODEL) as (router, worker):
        await router.wait_for(lambda: router.welcomes)
        assert "items" in router.welcomes[0].features
        await router.send_item(span.name, data, part_bytes=100)
        # Different text before the item: nothing is found in the prefix cache.
        prompts = [prompt_with(100 + 50 * i, span) for i in range(8)]
        groups = [await router.submit(prompt, items=[span]) for prompt in prompts]
        for group, prompt in zip(groups, prompts, strict=True):
            await router.finish(group)
            assert router.tokens[group, 0] == MODEL.generate(prompt, 8, items=[span])
        again = await router.submit(prompts[0], items=[span])
        assert (await router.finish(again)).num_cached_tokens == 32
        assert not router.wanted_items
        assert worker.runner.items is not None
        assert (worker.runner.items.num_received, worker.runner.items.num_encoded) == (1, 1)


async def test_another_image_under_the_same_tokens_is_another_prompt(options: Options):
    (first, one), (second, two) = item(b"one", 8), item(b"two", 8)
    prompt = prompt_with(100, first)
    async with serving(options, MODEL) as (router, _):
        await router.wait_for(lambda: router.welcomes)
        for span, data in ((first, one), (second, two)):
            await router.send_item(span.name, data)
            group = await router.submit(prompt, items=[span])
            finish = await router.finish(group)
            assert router.tokens[group, 0] == MODEL.generate(prompt, 8, items=[span])
            # The block before the item is shared.
            assert finish.num_cached_tokens == (0 if span is first else 8)


async def test_an_item_that_is_not_here_is_asked_for(options: Options):
    span, data = item(b"late", 3)
    prompt = prompt_with(100, span)
    async with serving(options, MODEL) as (router, _):
        group = await router.submit(prompt, items=[span])
        await router.wait_for(lambda: router.wanted_items)
        assert router.wanted_items == [span.name]
        # Others go on meanwhile.
        await router.finish(await router.submit(list(range(20, 30))))
        await router.send_item(span.name, data)
        await router.finish(group)
        assert router.tokens[group, 0] == MODEL.generate(prompt, 8, items=[span])


async def test_an_item_that_the_worker_cannot_decode_is_refused_and_others_go_on(options: Options):
    (bad, bad_data), (good, good_data) = item(BAD_FILE, 4), item(b"good", 4)
    async with serving(options, MODEL) as (router, _):
        await router.wait_for(lambda: router.welcomes)
        await router.send_item(bad.name, bad_data)
        await router.send_item(good.name, good_data)
        refused = await router.submit(prompt_with(100, bad), items=[bad], choices=(0, 1))
        fine = await router.submit(prompt_with(100, good), items=[good])
        rejection = await router.rejection(refused)
        assert rejection.reason == scheduler_pb2.REJECT_REASON_INVALID
        assert "can't be decoded: give a PNG" in rejection.message
        await router.finish(fine)
        await router.wait_idle()


async def test_text_goes_on_while_an_item_is_prepared(options: Options):
    span, data = item(b"slow", 0)
    async with serving(options, MODEL) as (router, worker):
        await router.wait_for(lambda: router.welcomes)
        assert worker.runner.items is not None
        worker.runner.items.may_prepare.clear()
        await router.send_item(span.name, data)
        waiting = await router.submit(prompt_with(100, span), items=[span])
        for _ in range(3):
            await router.finish(await router.submit(list(range(20, 50))))
        assert (waiting, 0) not in router.finishes
        worker.runner.items.may_prepare.set()
        await router.finish(waiting)


async def test_a_new_epoch_gets_the_items_again_without_asking_the_router(options: Options):
    items = [item(b"one", 4), item(b"two", 20)]
    spans = [span for span, _ in items]
    prompt, gate = prompt_with(100, *spans), Gate(first=4)
    async with running_scheduler(options) as scheduler, RouterEnd(scheduler.address) as router:
        async with running_worker(options, model=MODEL, before_step=gate):
            await router.wait_for(lambda: router.welcomes)
            for span, each in items:
                await router.send_item(span.name, each)
            group = await router.submit(prompt, items=spans, max_tokens=400)
            await asyncio.to_thread(gate.reached.wait, 30)
            gate.open()
            gate.first = 10**9
        async with running_worker(options, model=MODEL) as worker:
            await router.finish(group)
            assert router.tokens[group, 0] == MODEL.generate(prompt, 400, items=spans)
            assert worker.runner.items is not None
            assert worker.runner.items.num_encoded == 2
            assert not router.wanted_items


async def test_all_ranks_of_the_first_stage_prepare_an_item(tmp_path: Path):
    options = make_options(tmp_path, tensor_parallel_size=2)
    span, data = item(b"for two", 4)
    prompt = prompt_with(100, span)
    async with (
        running_scheduler(options) as scheduler,
        running_worker(options, model=MODEL) as first,
        running_worker(options, model=MODEL, rank=1) as second,
        RouterEnd(scheduler.address) as router,
    ):
        await router.wait_for(lambda: router.welcomes)
        assert first.runner.items is not None
        assert second.runner.items is not None
        second.runner.items.may_prepare.clear()
        await router.send_item(span.name, data)
        group = await router.submit(prompt, items=[span])
        await router.finish(await router.submit(list(range(20, 50))))
        assert (group, 0) not in router.finishes, "one rank has not prepared it"
        second.runner.items.may_prepare.set()
        await router.finish(group)
        assert router.tokens[group, 0] == MODEL.generate(prompt, 8, items=[span])
        assert first.runner.items.num_encoded == second.runner.items.num_encoded == 1


async def test_what_does_not_fit_is_refused_by_name(options: Options):
    large, data = item(b"large", 0, num_tokens=42)
    async with serving(options, MODEL) as (router, _):
        await router.wait_for(lambda: router.welcomes)
        await router.send_item(large.name, data)
        group = await router.submit(prompt_with(100, large, length=50), items=[large])
        assert "42 embeddings, more than encoder_cache_size=40" in (await router.rejection(group)).message
        outside = item(b"outside", 30, num_tokens=12)[0]
        group = await router.submit(prompt_with(100), items=[outside])
        assert "items[0] ends at token 42" in (await router.rejection(group)).message


async def test_a_replica_without_an_encoder_announces_no_items_and_refuses_them(options: Options):
    span, data = item(b"x", 0)
    async with serving(options, HashModel()) as (router, _):
        await router.wait_for(lambda: router.welcomes)
        assert "items" not in router.welcomes[0].features
        await router.send_item(span.name, data)
        group = await router.submit(prompt_with(100, span), items=[span])
        assert "the workers take none" in (await router.rejection(group)).message
