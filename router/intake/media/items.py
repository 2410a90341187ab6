"""The items of requests: checks them, fetches and reads their files beside the event loop, and holds them."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from protos import inference_pb2 as pb
from router.errors import InvalidRequest
from router.intake.media.fetching import Fetcher
from router.intake.media.store import ItemLease, ItemStore
from router.request.media.asked import AskedItem
from router.request.media.limits import MediaLimits
from router.request.media.read import File, ReadItem, inline_file, inline_size, read_item
from router.security.identity import Identity, caller_share
from router.text.tokenizer_pool import QUICK_SWITCHES
from router.turns import Turns
from runtime.media.recipes.recipe import Recipe

# They mostly hash, which needs no interpreter lock.
_NUM_THREADS = 2
# Fields of messages around the files, which inline_size counts.
_MESSAGE_BYTES = 65_536

_Result = TypeVar("_Result")


class Items:
    """Those of all requests of a router process."""

    def __init__(self, limits: MediaLimits, store: ItemStore, fetcher: Fetcher) -> None:
        self.limits = limits
        self.store = store
        self._fetcher = fetcher
        self._turns = Turns(_NUM_THREADS)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="media")

    def lease(self, identity: Identity) -> "RequestItems":
        """Returns the lease of a request of a caller, empty so far. To be closed."""
        return RequestItems(self, identity)

    async def read(
        self, asked: Sequence[AskedItem], options: pb.ItemOptions, recipe: Recipe, lease: ItemLease
    ) -> list[ReadItem]:
        """Returns items, which `lease` holds from now on. Raises RequestError."""
        inline = [inline_size(image) for each in asked for image in each.images]
        self._check_size(sum(inline))
        lease.reserve(sum(inline))
        files = [await self._files(each, lease) for each in asked]
        self._check_size(sum(len(file.data) for own in files for file in own))
        return lease.keep(await self._run(lambda: self._read(asked, files, options, recipe)))

    async def close(self) -> None:
        await self._fetcher.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _files(self, asked: AskedItem, lease: ItemLease) -> list[File]:
        """Raises RequestError."""
        fields = [asked.image_field(i) for i in range(len(asked.images))]

        def inline() -> list[File | str]:
            return [inline_file(image, field) for image, field in zip(asked.images, fields, strict=True)]

        files: list[File] = []
        for image, field, found in zip(asked.images, fields, await self._run(inline), strict=True):
            if isinstance(found, str):
                most = self.limits.max_item_bytes
                # A server's own word for the type is often wrong; the data tells.
                found = File(await self._fetcher.fetch(found, f"{field}.url", most, lease.reserve), image.mime_type)
            files.append(found)
        return files

    def _read(
        self, asked: Sequence[AskedItem], files: Sequence[Sequence[File]], options: pb.ItemOptions, recipe: Recipe
    ) -> list[ReadItem]:
        """Raises InvalidRequest."""
        return [read_item(each, own, options, recipe, self.limits) for each, own in zip(asked, files, strict=True)]

    def _check_size(self, num_bytes: int) -> None:
        """Raises InvalidRequest."""
        most = self.limits.max_request_bytes
        if num_bytes > most + _MESSAGE_BYTES:
            raise InvalidRequest(f"items have {num_bytes} bytes together: max_items_mib allows {most}")

    async def _run(self, function: Callable[[], _Result]) -> _Result:
        """Runs a function on a thread, callers in turn."""
        await self._turns.take(caller_share())
        QUICK_SWITCHES.begin()
        work = asyncio.get_running_loop().run_in_executor(self._threads, function)
        # A function that has begun keeps its turn until it ends, even if its caller goes away.
        work.add_done_callback(self._end_turn)
        return await asyncio.shield(work)

    def _end_turn(self, work: asyncio.Future[Any]) -> None:
        QUICK_SWITCHES.end()
        self._turns.give_back()
        if not work.cancelled():
            # Marks the error as seen, for a client that has left.
            work.exception()


class RequestItems(ItemLease):
    """The items of one request, and how they are read (router.request.features.items.ItemReader)."""

    def __init__(self, items: Items, identity: Identity) -> None:
        super().__init__(items.store, identity)
        self._items = items

    @property
    def limits(self) -> MediaLimits:
        return self._items.limits

    async def read(self, asked: Sequence[AskedItem], options: pb.ItemOptions, recipe: Recipe) -> list[ReadItem]:
        """Raises RequestError."""
        return await self._items.read(asked, options, recipe, self)
