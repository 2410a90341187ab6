"""Replicas in lockstep with images: one replica's steps wait for its images, the other one's go on beside them."""

import asyncio
from pathlib import Path

from protos import inference_pb2
from tests.fakes.hash_runner import HashModel
from tests.support.scheduler.items import item, prompt_with
from tests.support.scheduler.lockstep import Replica, make_lockstep_options, running_replicas

MODEL = HashModel(encoder_cache_size=40)
NUM_TOKENS = 60


async def _begin(replica: Replica, number: int) -> tuple[int, list[int], list[inference_pb2.ItemSpan]]:
    """Submits a stream with two images; the second one is of both replicas' streams."""
    items = [item(b"an image %d" % number, 4), item(b"the same image", 20)]
    for span, data in items:
        await replica.router.send_item(span.name, data)
    spans = [span for span, _ in items]
    prompt = prompt_with(100 + 40 * number, *spans)
    return await replica.router.submit(prompt, items=spans, max_tokens=NUM_TOKENS), prompt, spans


async def test_images_in_lockstep_and_after_a_death(tmp_path: Path) -> None:
    options = make_lockstep_options(tmp_path, max_num_encoder_input_tokens=16, max_steps_in_flight=2)
    async with running_replicas(options, with_workers=False) as replicas:
        for each in replicas:
            await each.start_worker(0, model=MODEL)
        for each in replicas:
            assert "items" in (await each.welcome(1)).features
        first, second = replicas
        # Alone, beside a replica whose steps are empty.
        group, prompt, spans = await _begin(first, 0)
        await first.router.finish(group)
        assert first.router.tokens[group, 0] == MODEL.generate(prompt, NUM_TOKENS, items=spans)
        begun = [(each, *await _begin(each, number)) for number, each in enumerate((first, second, second), start=1)]
        text = await first.router.submit(prompt_with(500), max_tokens=NUM_TOKENS)
        for each, group, _, _ in begun:
            await each.router.wait_for(lambda each=each, group=group: len(each.router.tokens[group, 0]) > 3)
        await asyncio.to_thread(second.workers[0].stop)
        await second.start_worker(0, model=MODEL)
        for each, group, prompt, spans in begun:
            await each.router.finish(group)
            assert each.router.tokens[group, 0] == MODEL.generate(prompt, NUM_TOKENS, items=spans)
        await first.router.finish(text)
        assert first.router.tokens[text, 0] == MODEL.generate(prompt_with(500), NUM_TOKENS)
        # What the new process needs comes from the scheduler.
        assert not any(each.router.wanted_items for each in replicas)
        assert (await first.welcome(2)).epoch == (await second.welcome(2)).epoch
