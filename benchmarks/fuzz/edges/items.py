"""Images of clients: damaged, disguised and oversized files, over gRPC. Those that are accepted are decoded, too."""

import asyncio
import base64
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import grpc.aio

from benchmarks.fuzz.edge import Edge
from benchmarks.fuzz.images import hostile_image
from protos import inference_pb2 as pb
from protos.inference_pb2_grpc import InferenceStub
from router.server import RouterServer
from runtime.media.headers import read_header
from tests.fakes.media import chat_with, image_file, image_item, media_scheduler, media_tokenizer
from tests.fakes.routers import running_router, running_schedulers, socket_address
from tests.fakes.scheduler import FakeScheduler
from worker.encoders.encoder import ItemError
from worker.encoders.pixels import Frames

_OTHERS = (
    b"",
    b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    b"%PDF-1.7\n",
    b"II*\0" + bytes(100),
    b"\x89PNG\r\n\x1a\n",
    b"\xff\xd8\xff",
    b"RIFF\0\0\0\0WEBP",
    b"GIF89a",
    b"BM",
    b"\0\0\0\x0cjP  \r\n\x87\n",
    b"P6 9999 9999 255\n",
)
_MIME_TYPES = ("", "", "", "image/png", "image/jpeg", "image/svg+xml", "image/gif; q=1", "\0", "x" * 200)
_URLS = (
    "http://127.0.0.1/",
    "http://169.254.169.254/latest",
    "file:///etc/passwd",
    "data:",
    "data:;base64,=",
    "gopher://a",
    "http://[::1]/",
    "https://images.test@127.0.0.1/",
    "data:image/png;base64," + "A" * 5001,
)
# Pixels that the options of this edge allow.
_MOST_PIXELS = 1_000_000
# The event loop's lag while a request is answered; the client's work is in it, too.
_MOST_LAG_S, _TICK_S = 0.05, 0.002


class _Items:
    """A message is the length of a mime type, the type, and a file, or URL if the length is 255."""

    def __init__(self, server: RouterServer, stub: InferenceStub, scheduler: FakeScheduler) -> None:
        self._server, self._stub, self._scheduler = server, stub, scheduler
        # The longest time by which the loop woke late.
        self._most_lag = 0.0
        # Requests so far; not in flight, files are made and decoded in this process, and memory is measured.
        self._num_asked, self._is_asking = 0, False

    def malformed(self, random: Random) -> bytes:
        if random.random() < 0.03:
            return b"\xff" + random.choice(_URLS).encode()
        mime_type = random.choice(_MIME_TYPES).encode()
        return bytes([len(mime_type)]) + mime_type + self._file(random)

    def _file(self, random: Random) -> bytes:
        if random.random() < 0.05:
            return random.choice(_OTHERS)
        return hostile_image(random)

    async def feed(self, message: bytes) -> str:
        length = message[0] if message else 0
        if length == 255:
            item = pb.Item(image=pb.Image(url=message[1:].decode(errors="replace")))
        else:
            mime_type, data = message[1 : 1 + length].decode(errors="replace"), message[1 + length :]
            item = pb.Item(image=pb.Image(data=data, mime_type=mime_type))
            if len(message) % 3 == 0:
                url = f"data:{mime_type};base64,{base64.b64encode(data).decode()}"
                item = pb.Item(image=pb.Image(url=url))
        try:
            await self._ask(item)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
                raise
            return "refused"
        return await asyncio.to_thread(_decode, self._last_item())

    async def _ask(self, item: pb.Item) -> None:
        request = pb.GenerateRequest(chat=chat_with(item, "?"), sampling=pb.SamplingParams(max_tokens=1, seed=1))
        self._num_asked, self._is_asking = self._num_asked + 1, True
        try:
            await self._stub.GenerateUnary(request)
        finally:
            self._is_asking = False

    def _last_item(self) -> pb.ItemData:
        (span,) = self._scheduler.submitted[-1].items
        data = pb.ItemData.FromString(self._scheduler.items.pop(span.name))
        self._scheduler.submitted.clear()
        self._scheduler.prompts.clear()
        self._scheduler.arrived_items.clear()
        return data

    async def tick(self) -> None:
        """Measures the lag of the event loop, which is the router's, until it is cancelled."""
        while True:
            since, used, request = time.monotonic(), time.process_time(), self._num_asked
            was_asking = self._is_asking
            await asyncio.sleep(_TICK_S)
            if was_asking and self._is_asking and self._num_asked == request:
                # Time that this process did not compute went to other processes.
                lag = min(time.monotonic() - since - _TICK_S, time.process_time() - used)
                self._most_lag = max(self._most_lag, lag)

    async def check(self) -> None:
        assert self._most_lag < _MOST_LAG_S, f"the event loop has lagged by {self._most_lag * 1000:.0f} ms"
        await self._ask(image_item(image_file()))
        assert _decode(self._last_item()) == "decoded"
        await self._server.streams.wait_empty()
        store = self._server.intake.items.store
        assert (len(store), store.num_bytes) == (0, 0), "items are left over"


def _decode(data: pb.ItemData) -> str:
    """Decodes an item as workers do. Its size must be what the router has counted with."""
    try:
        image = Frames(data).decoded(0)
    except ItemError:
        return "accepted, not decoded"
    header = read_header(data.files[0])
    assert image.size == (header.width, header.height), f"decoded as {image.size}, and the header said {header}"
    return "decoded"


@asynccontextmanager
async def items(directory: Path) -> AsyncIterator[Edge]:
    fake = media_scheduler(socket_address(directory, "one"))
    router = running_router([fake.address], tokenizer=media_tokenizer(), max_item_pixels=_MOST_PIXELS)
    async with running_schedulers(fake), router as (server, stub):
        await server.wait_ready()
        edge = _Items(server, stub, fake)
        # A router does not have the decoder's libraries, whose objects take the collector 100 ms.
        gc.freeze()
        ticking = asyncio.create_task(edge.tick())
        yield edge
        ticking.cancel()
        gc.unfreeze()
