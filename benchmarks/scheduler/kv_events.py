"""Follows the schedulers' prefix caches over ZeroMQ as an outside router does, and compares the pictures at the end.

    python -m benchmarks.scheduler.kv_events                       10,000 requests over two replicas: a minute or two
    python -m benchmarks.scheduler.kv_events --requests 1000 --seed 3 --json

Two schedulers and their workers run as processes of their own; the workers compute hashes instead of a model
(tests/fakes/worker.py). The requests share prefixes and need more blocks than there are, so that blocks are evicted all
the time. In the middle one worker is killed with -9, which empties its replica's cache, and the other's cache is reset.

The subscriber (tests/support/scheduler/vllm_subscriber.py) is written from vLLM's documentation and knows nothing of
Octavo. For each replica one reads everything, one loses messages at random and has them replayed, and one comes when
all is over. Their pictures are compared with the content that the scheduler tells a router that joins then. The token
ids that they were told are hashed again, by which blocks are named. Exits with 1 at any difference.
"""

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.command import show
from configs.options import Options
from octavo.client.admin import Admin
from runtime.block_hashes import hash_prompt_blocks, scope_of
from scheduler.sessions.kv_events.publisher import outside_hash
from tests.support.scheduler.scheduler_process import scheduler_process
from tests.support.scheduler.scheduling import RouterEnd, make_options, worker_process
from tests.support.scheduler.vllm_subscriber import BlockRemoved, BlockStored, VllmSubscriber

NUM_REPLICAS, NUM_BLOCKS, BLOCK_SIZE = 2, 1200, 16
_AT_ONCE = 48
_NUM_PREFIXES, _PREFIX_BLOCKS = 40, (1, 12)
# A quarter of the messages is lost.
_LOST = 0.25
_SETTLE_S = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A replica's cache at the end. cached: blocks by the scheduler itself; follower, lossy, late: how many each
    subscriber holds; wrong: blocks that only one of scheduler and subscriber has, over the three; names_checked: blocks
    whose tokens, told since the beginning of their sequence, gave their name."""

    replica: int
    requests: int
    messages: int
    stored: int
    removed: int
    cleared: int
    lost: int
    gaps: int
    replayed: int
    cached: int
    follower: int
    lossy: int
    late: int
    wrong: int
    names_checked: int
    names_wrong: int


class _Following:
    """Reads a subscriber's messages on a thread until `stop`."""

    def __init__(self, subscriber: VllmSubscriber, seed: str, loss: float) -> None:
        """loss: probability that a message is lost."""
        self.subscriber = subscriber
        self.num_lost = self.num_gaps = 0
        self._choose, self._loss = random.Random(seed), loss
        self._is_ending = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        """Reads what has come, and has replayed what was lost at the end. Raises what the reading raised."""
        self._is_ending.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        subscriber = self.subscriber
        try:
            while subscriber.has_more() or not self._is_ending.is_set():
                if subscriber.has_more():
                    is_lost = self._choose.random() < self._loss
                    missed = subscriber.num_missed
                    subscriber.read(drop=is_lost)
                    self.num_lost += is_lost
                    self.num_gaps += subscriber.num_missed > missed
            subscriber.catch_up()
        except BaseException as error:  # noqa: BLE001 - `stop` raises it
            self._error = error


class _Replica:
    def __init__(self, options: Options, number: int, running: contextlib.ExitStack, seed: int) -> None:
        self._options, self.number, self._running, self._seed = options, number, running, seed
        running.enter_context(scheduler_process(options, f"--replica={number}"))
        self._worker = self._start_worker()
        self.address = options.scheduler_address(number)
        self.following = [_Following(self._subscriber(), f"{seed}/{number}", loss) for loss in (0, _LOST)]
        running.callback(self._stop_following)

    def _start_worker(self):
        flags = [f"--data-parallel-size={NUM_REPLICAS}", f"--num-blocks-override={NUM_BLOCKS}"]
        flags += [f"--replica={self.number}", "--log-level=error"]
        return self._running.enter_context(worker_process(self._options, *flags))

    def _subscriber(self) -> VllmSubscriber:
        subscriber = VllmSubscriber(*self._options.kv_events_endpoints(self.number), self._options.kv_events_topic)
        self._running.callback(subscriber.close)
        return subscriber

    def _stop_following(self) -> None:
        for each in self.following:
            with contextlib.suppress(BaseException):
                each.stop()

    async def serve(self, num_requests: int) -> None:
        """Serves requests, _AT_ONCE at a time; disturbs the replica in the middle."""
        choose = random.Random(f"{self._seed}/{self.number}/requests")
        prefixes = [
            [choose.randrange(20, 1000) for _ in range(BLOCK_SIZE * choose.randint(*_PREFIX_BLOCKS))]
            for _ in range(_NUM_PREFIXES)
        ]
        left = iter(range(num_requests))
        # A call allows one write at a time.
        submitting = asyncio.Lock()
        async with RouterEnd(self.address) as router:

            async def serve_some() -> None:
                for number in left:
                    if number == num_requests // 2:
                        await asyncio.to_thread(self._disturb)
                    prompt = choose.choice(prefixes) + [
                        choose.randrange(20, 1000) for _ in range(choose.randint(1, 60))
                    ]
                    async with submitting:
                        group = await router.submit(prompt, max_tokens=choose.randint(1, 12))
                    await router.finish(group)

            async with asyncio.TaskGroup() as tasks:
                for _ in range(_AT_ONCE):
                    tasks.create_task(serve_some())
            await router.wait_idle()

    def _disturb(self) -> None:
        if self.number == 0:
            self._worker.kill()
            self._worker.wait()
            self._worker = self._start_worker()
        else:
            with Admin(self.address) as admin:
                admin.reset_prefix_cache()

    async def compare(self, num_requests: int) -> Picture:
        """Compares all pictures. Raises what a subscriber found wrong."""
        late = self._subscriber()
        await asyncio.to_thread(late.catch_up)
        for each in self.following:
            await asyncio.to_thread(each.stop)
        follower, lossy = (each.subscriber for each in self.following)
        cached = await self._cached()
        events = [event for batch in follower.batches for event in batch.events]
        num_stored = sum(len(event.block_hashes) for event in events if isinstance(event, BlockStored))
        num_removed = sum(len(event.block_hashes) for event in events if isinstance(event, BlockRemoved))
        checked = _check_names(follower)
        return Picture(
            replica=self.number,
            requests=num_requests,
            messages=follower.last + 1,
            stored=num_stored,
            removed=num_removed,
            cleared=sum(not isinstance(event, BlockStored | BlockRemoved) for event in events),
            lost=self.following[1].num_lost,
            gaps=self.following[1].num_gaps,
            replayed=lossy.num_missed,
            cached=len(cached),
            follower=len(follower.blocks),
            lossy=len(lossy.blocks),
            late=len(late.blocks),
            wrong=sum(len(cached ^ each.blocks.keys()) for each in (follower, lossy, late)),
            names_checked=len(checked),
            names_wrong=sum(not is_right for is_right in checked),
        )

    async def _cached(self) -> set[int]:
        """Returns what a router that joins now is told to be in the cache, by the names that outside routers see."""
        async with RouterEnd(self.address, watch_cache=True) as router:
            await router.wait_for(lambda: router.cache_events)
            await asyncio.sleep(_SETTLE_S)
            assert router.cache_events[0].HasField("cleared"), "no picture from the beginning"
            assert all(event.HasField("stored") for event in router.cache_events[1:]), "the cache changes while idle"
            return {outside_hash(event.stored) for event in router.cache_events[1:]}


def _check_names(subscriber: VllmSubscriber) -> list[bool]:
    """For each block whose predecessors are all known: whether its tokens give its name."""
    found, blocks = [], subscriber.blocks
    for name, (tokens, parent) in blocks.items():
        chain = [tokens]
        while parent is not None and parent in blocks:
            before, parent = blocks[parent]
            chain.append(before)
        if parent is None:
            token_ids = [token for part in reversed(chain) for token in part]
            *_, last = hash_prompt_blocks(token_ids, BLOCK_SIZE, scope_of(""))
            found.append(outside_hash(last) == name)
    return found


@contextlib.contextmanager
def _replicas(seed: int) -> Iterator[list[_Replica]]:
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as running:
        options = make_options(
            Path(directory),
            data_parallel_size=NUM_REPLICAS,
            block_size=BLOCK_SIZE,
            num_blocks_override=NUM_BLOCKS,
            max_num_seqs=_AT_ONCE,
            max_num_batched_tokens=1024,
            log_level="error",
            drain_timeout=0.0,
            kv_events_endpoint=f"ipc://{directory}/kv",
            kv_events_replay_endpoint=f"ipc://{directory}/kv-replay",
            kv_events_topic="kv-events",
            kv_events_buffer_steps=10**6,
        )
        yield [_Replica(options, number, running, seed) for number in range(NUM_REPLICAS)]


async def _run(replicas: list[_Replica], num_requests: int) -> list[Picture]:
    each = num_requests // len(replicas)
    await asyncio.gather(*(replica.serve(each) for replica in replicas))
    return [await replica.compare(each) for replica in replicas]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000, help="over both replicas; default: %(default)s")
    parser.add_argument("--seed", type=int, default=None, help="default: a random one, which is printed")
    parser.add_argument("--json", action="store_true", help="a line for each replica")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(2**31) if arguments.seed is None else arguments.seed
    began = time.monotonic()
    with _replicas(seed) as replicas:
        pictures = asyncio.run(_run(replicas, arguments.requests))
    if not arguments.json:
        print(f"seed {seed}; {time.monotonic() - began:.0f} s")
    for picture in pictures:
        show({"seed": seed, **asdict(picture)}, as_json=arguments.json)
    return int(any(each.wrong or each.names_wrong or not each.names_checked or not each.gaps for each in pictures))


if __name__ == "__main__":
    sys.exit(main())
