"""Outside routers follow the prefix cache over ZeroMQ, as they follow vLLM's; what they miss is replayed."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from runtime.block_hashes import hash_prompt_blocks, scope_of
from scheduler.sessions.kv_events.publisher import outside_hash
from scheduler.sockets import AddressError
from tests.support.ports import free_port
from tests.support.scheduler.kv_events import TOPIC, cached, events_options, serve_prompts
from tests.support.scheduler.scheduling import RouterEnd, running_scheduler, running_worker
from tests.support.scheduler.vllm_subscriber import VllmSubscriber


@contextmanager
def subscribed(options, replica: int = 0, topic: str = TOPIC) -> Iterator[VllmSubscriber]:
    endpoint, replay_endpoint = options.kv_events_endpoints(replica)
    subscriber = VllmSubscriber(endpoint, replay_endpoint, topic)
    try:
        yield subscriber
    finally:
        subscriber.close()


async def test_a_subscribers_picture_is_the_schedulers(tmp_path: Path) -> None:
    options = events_options(tmp_path, data_parallel_size=2)
    async with (
        running_scheduler(options) as first,
        running_scheduler(options, replica=1) as second,
        running_worker(options),
        running_worker(options, replica=1),
    ):
        with subscribed(options) as one, subscribed(options, 1) as other:
            await asyncio.gather(serve_prompts(options, 40), serve_prompts(options, 40, replica=1, seed=1))
            # A subscriber that comes late has all replayed that is kept.
            with subscribed(options) as late:
                for each in (one, other, late):
                    await asyncio.to_thread(each.catch_up)
                assert one.blocks.keys() == cached(first) == late.blocks.keys()
            assert other.blocks.keys() == cached(second)
            assert {batch.data_parallel_rank for batch in one.batches} == {0}
            assert {batch.data_parallel_rank for batch in other.batches} == {1}
            assert any("BlockRemoved" in str(batch.events) for batch in one.batches)


async def test_blocks_are_told_with_their_tokens_and_the_blocks_before_them(tmp_path: Path) -> None:
    options = events_options(tmp_path)
    async with running_scheduler(options), running_worker(options), RouterEnd(options.scheduler_address(0)) as router:
        with subscribed(options) as subscriber:
            await router.finish(await router.submit(list(range(30, 55)), max_tokens=1))
            await asyncio.to_thread(subscriber.catch_up)
    names = [outside_hash(each) for each in hash_prompt_blocks(range(30, 54), 8, scope_of(""))]
    assert subscriber.blocks == {
        name: (tuple(range(30 + 8 * index, 38 + 8 * index)), names[index - 1] if index else None)
        for index, name in enumerate(names)
    }


async def test_a_gap_is_seen_and_filled(tmp_path: Path) -> None:
    options = events_options(tmp_path)
    async with running_scheduler(options) as server, running_worker(options):
        with subscribed(options) as subscriber:
            await serve_prompts(options, 1)
            await asyncio.to_thread(subscriber.catch_up)
            known = subscriber.last
            await serve_prompts(options, 12, seed=2)

            def read_every_fourth() -> None:
                # The last message is read, so that what precedes it is asked for.
                while subscriber.has_more():
                    lost = subscriber.read(drop=True)
                    if lost % 4 == 0:
                        subscriber.catch_up()
                        break
                while subscriber.has_more():
                    subscriber.read()

            await asyncio.to_thread(read_every_fourth)
            assert subscriber.last > known
            assert subscriber.blocks.keys() == cached(server)


async def test_old_batches_are_dropped_and_a_bad_request_is_passed_over(tmp_path: Path) -> None:
    options = events_options(tmp_path, kv_events_buffer_steps=3)
    async with running_scheduler(options), running_worker(options):
        await serve_prompts(options, 8)

        def ask(*frames: bytes) -> list[int]:
            with zmq.Context() as context, context.socket(zmq.DEALER) as replay:
                replay.linger = 0
                replay.connect(options.kv_events_replay_endpoint)
                replay.send_multipart([b"no", b"number"])
                replay.send_multipart([b"", *frames])
                numbers = []
                while replay.poll(5000):
                    _, _, number, payload = replay.recv_multipart()
                    if not payload:
                        return numbers
                    numbers.append(int.from_bytes(number, "big"))
            raise AssertionError("no end")

        numbers = await asyncio.to_thread(ask, (0).to_bytes(8, "big"))
        assert len(numbers) == 3
        assert numbers == list(range(numbers[0], numbers[0] + 3))
        assert await asyncio.to_thread(ask, (numbers[-1] + 1).to_bytes(8, "big")) == []


async def test_an_endpoint_in_use_is_named(tmp_path: Path) -> None:
    port = free_port()
    options = events_options(
        tmp_path,
        kv_events_endpoint=f"tcp://127.0.0.1:{port}",
        kv_events_replay_endpoint=f"tcp://127.0.0.1:{free_port()}",
    )
    with zmq.Context() as context, context.socket(zmq.PUB) as taken:
        taken.bind(options.kv_events_endpoint)
        with pytest.raises(AddressError, match="kv_events_endpoint: cannot listen on tcp://"):
            async with running_scheduler(options):
                pass


def test_options_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    for fields, named in (
        ({"kv_events_endpoint": "udp://x:1"}, "kv_events_endpoint='udp://x:1'"),
        ({"kv_events_endpoint": ""}, "needs kv_events_endpoint"),
        (
            {
                "data_parallel_size": 2,
                "kv_events_endpoint": "tcp://*:5557",
                "kv_events_replay_endpoint": "tcp://*:5558",
            },
            "leave room",
        ),
    ):
        with pytest.raises(ValueError, match=named):
            events_options(tmp_path, **fields)
