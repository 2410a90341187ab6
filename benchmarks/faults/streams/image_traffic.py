"""Requests with images of well and badly behaved clients, as in benchmarks.faults.traffic, and the memory that items
take meanwhile."""

import asyncio
import base64
import contextlib
import functools
import json
import random
from dataclasses import dataclass, field

from benchmarks.faults.cluster import Cluster, Kind
from benchmarks.faults.grey.means.relay import Relay
from benchmarks.faults.traffic import Edge, Manner, Surprise, post, some_sampling
from octavo import AsyncClient
from octavo.client.errors import InvalidRequest, OctavoError, Overloaded
from octavo.client.requests import Message
from octavo.client.results import Delta, Finished

# Less than the files of all clients together, so that requests also come when there is no room.
_ITEM_MEMORY = 0.005
FLAGS = (f"--item-memory={_ITEM_MEMORY}",)
_MOST_IMAGES = 3
_SIDES = (60, 420)
_NUM_FILES = 12
_SHARE_SHARED = 0.3
# Gauges of each kind of process. What item_memory bounds, and what is only reported.
_BOUNDED = {
    Kind.ROUTER: {"octavo_item_bytes": True},
    Kind.SCHEDULER: {"octavo_stored_item_bytes": True, "octavo_needed_item_bytes": True},
    Kind.WORKER: {"octavo_worker_item_input_bytes": False},
}
_WATCH_S = 0.5


@dataclass(slots=True)
class Peaks:
    """The most bytes of items that any process of a kind had when it was asked."""

    cluster: Cluster
    mib: dict[str, float] = field(default_factory=dict)
    # A sentence for each time that it was more than item_memory.
    surprises: list[str] = field(default_factory=list)

    async def watch(self, stop: asyncio.Event) -> None:
        """Asks all processes in turn until `stop` is set."""
        most = int(self.cluster.options.item_memory * 2**30)
        while not stop.is_set():
            for place in self.cluster.places():
                samples = await self.cluster.samples(place)
                if samples is None:
                    continue
                for metric, is_bounded in _BOUNDED[place.kind].items():
                    num_bytes, name = samples.value(metric), f"{place.kind}: {metric}"
                    self.mib[name] = max(self.mib.get(name, 0.0), round(num_bytes / 2**20, 2))
                    if is_bounded and num_bytes > most:
                        self.surprises.append(f"{place}: {metric} is {num_bytes:.0f}, above item_memory={most}")
            await asyncio.sleep(_WATCH_S)


@functools.cache
def _files() -> tuple[bytes, ...]:
    from tests.support.models.vision_models import file_of, picture

    choose = random.Random(0)
    sizes = [(choose.randint(*_SIDES), choose.randint(*_SIDES)) for _ in range(_NUM_FILES)]
    return tuple(file_of(picture(*size, seed), ("PNG", "JPEG")[seed % 2]) for seed, size in enumerate(sizes))


def _a_file(choose: random.Random) -> bytes:
    """Some files are in many requests; of the others, what follows the image makes each another item."""
    file = choose.choice(_files())
    return file if choose.random() < _SHARE_SHARED else file + choose.randbytes(16)


def _a_chat(choose: random.Random, files: list[bytes] | None = None) -> list[Message]:
    files = files or [_a_file(choose) for _ in range(choose.randint(1, _MOST_IMAGES))]
    content: list[object] = [{"type": "text", "text": f"{choose.randrange(100)}: "}]
    content += [{"type": "image", "image": file} for file in files]
    return [{"role": "user", "content": content}]


async def finish(edge: Edge, choose: random.Random) -> str:
    async with edge.client(choose) as client:
        try:
            generation = await client.generate(_a_chat(choose), some_sampling(choose))
        except Overloaded:
            return "no room"
    return "finished" if generation.num_resumes == 0 else "finished, resumed"


async def leave(edge: Edge, choose: random.Random) -> str:
    """Ends its own gRPC call after some pieces."""
    num_pieces = choose.randint(0, 12)
    async with edge.client(choose) as client, client.stream(_a_chat(choose), some_sampling(choose)) as stream:
        try:
            async for event in stream:
                if isinstance(event, Finished):
                    return "finished"
                num_pieces -= isinstance(event, Delta)
                if num_pieces <= 0:
                    break
        except Overloaded:
            return "no room"
    return "left"


async def vanish(edge: Edge, choose: random.Random) -> str:
    """Breaks the client's connections, while it sends the images or later."""
    async with Relay.to(choose.choice(edge.targets)) as relay, AsyncClient(relay.address, retry_for=0) as client:
        task = asyncio.create_task(client.generate(_a_chat(choose), some_sampling(choose)))
        await asyncio.wait([task], timeout=choose.uniform(0.005, 1.0))
        relay.end()
        with contextlib.suppress(OctavoError):
            await task
            return "finished"
    return "vanished"


async def send_hostile(edge: Edge, choose: random.Random) -> str:
    """Sends what is no image, too many, or one that ends too early."""
    whole = _a_file(choose)
    bomb = bytearray(_files()[0])
    bomb[16:24] = b"\0\1\0\0" * 2
    # A file that is cut in two has a header that routers accept; the worker refuses it.
    files = choose.choice([[whole] * 4, [b"<svg/>"], [bytes(bomb)], [whole, whole[: len(whole) // 2]]])
    async with edge.client(choose) as client:
        try:
            await client.generate(_a_chat(choose, files), some_sampling(choose))
        except InvalidRequest:
            return "refused"
        except Overloaded:
            return "no room"
    raise Surprise(f"{len(files)} files, the last one of {len(files[-1])} bytes, were served")


async def call_over_http(edge: Edge, choose: random.Random) -> str:
    """Sends a data: URI through the gateway; some clients leave in the middle."""
    url = f"data:;base64,{base64.b64encode(_a_file(choose)).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 20, "stream": choose.random() < 0.7}
    leaves_after = choose.randint(0, 600) if choose.random() < 0.3 else None
    port = choose.choice(edge.http_ports)
    status, answer = await post(port, "/v1/chat/completions", json.dumps(body).encode(), leaves_after=leaves_after)
    if leaves_after is not None:
        return "left"
    if status == 200 and (not body["stream"] or b"data: [DONE]" in answer):
        return "finished"
    # The router was killed, has no replica, or no room.
    if status in (0, 200, 429, 503):
        return "no room" if status == 429 else "broken"
    raise Surprise(f"HTTP status {status}: {answer[:300]!r}")


# Weights of the kinds of requests.
MANNERS: dict[Manner, int] = {finish: 30, leave: 14, vanish: 8, send_hostile: 12, call_over_http: 14}
