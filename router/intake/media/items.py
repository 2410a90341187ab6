"""The items of requests: checks them, fetches and reads their files beside the event loop, and holds them."""

import asyncio
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from protos import inference_pb2 as pb
from router.errors import InvalidRequest, ItemsNeeded, MissingFeature
from router.intake.media.asked import AskedItem, asked_items
from router.intake.media.fetching import Fetcher
from router.intake.media.limits import MediaLimits
from router.intake.media.read import File, ReadItem, inline_file, inline_size, read_item
from router.intake.media.store import Held, ItemStore
from router.security.identity import caller_share
from router.text.tokenizer_pool import QUICK_SWITCHES, Turns
from runtime.media.recipes.recipe import Recipe
from runtime.media.recipes.registry import recipe_from_json

# They mostly hash, which needs no interpreter lock.
_NUM_THREADS = 2
# Fields of messages around the files, which inline_size counts.
_MESSAGE_BYTES = 65_536

_Result = TypeVar("_Result")

# Recipes are large for models with a token for each tile; replicas of one model have one.
recipe_of = functools.lru_cache(maxsize=8)(recipe_from_json)


class Items:
    """Those of all requests of a router process."""

    def __init__(self, limits: MediaLimits, store: ItemStore, fetcher: Fetcher) -> None:
        self.limits = limits
        self.store = store
        self._fetcher = fetcher
        self._turns = Turns(_NUM_THREADS)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="media")

    def recipe(self, media_json: str) -> Recipe | None:
        """Returns the recipe of a model; None if it takes no items. media_json: ModelInfo's.

        Raises MissingFeature for one that this version does not know.
        """
        try:
            return recipe_of(media_json) if media_json else None
        except ValueError as error:
            raise MissingFeature(
                f"items: this router can't read the replicas' media_json ({error}): update it"
            ) from None

    async def read(
        self, message: pb.GenerateRequest | pb.TokenizeRequest, recipe: Recipe | None, held: Held
    ) -> list[ReadItem]:
        """Returns a message's items, which `held` holds from now on. Raises RequestError."""
        asked = asked_items(message)
        if not asked:
            return []
        recipe, options = _checked(message, asked, recipe, self.limits)
        inline = [inline_size(image) for each in asked for image in each.images]
        self._check_size(sum(inline))
        held.reserve(sum(inline))
        files = [await self._files(each, held) for each in asked]
        self._check_size(sum(len(file.data) for own in files for file in own))
        return held.keep(await self._run(lambda: self._read(asked, files, options, recipe)))

    async def of_resume(self, message: pb.GenerateRequest, recipe: Recipe | None, held: Held) -> list[ReadItem]:
        """Returns the items of a resume, of message.resume.items. Raises ItemsNeeded if the router has not got them and
        the client has sent none, and other RequestErrors."""
        spans = message.resume.items
        if not spans:
            if message.items:
                raise InvalidRequest(
                    f"items has {len(message.items)} entries, and resume.items none: give Started.items"
                )
            return []
        if recipe is None:
            raise InvalidRequest(f"resume.items has {len(spans)} entries, and this model takes text only")
        if not message.items:
            found = [held.find(span.name) for span in spans]
            missing = [i for i, item in enumerate(found) if item is None]
            if missing:
                raise ItemsNeeded(f"resume.items[{missing[0]}] is not at this router: send the request's items again")
            return [item for item in found if item is not None]
        if len(message.items) != len(spans):
            raise InvalidRequest(
                f"items has {len(message.items)} entries, and resume.items {len(spans)}: give all of them"
            )
        read = await self.read(message, recipe, held)
        for i, (span, item) in enumerate(zip(spans, read, strict=True)):
            if span.name != item.packed.name:
                raise InvalidRequest(
                    f"items[{i}] is not the item of resume.items[{i}]: send the same file, with the same item_options"
                )
        return read

    async def close(self) -> None:
        await self._fetcher.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _files(self, asked: AskedItem, held: Held) -> list[File]:
        """Raises RequestError."""
        fields = [asked.image_field(i) for i in range(len(asked.images))]

        def inline() -> list[File | str]:
            return [inline_file(image, field) for image, field in zip(asked.images, fields, strict=True)]

        files: list[File] = []
        for image, field, found in zip(asked.images, fields, await self._run(inline), strict=True):
            if isinstance(found, str):
                most = self.limits.max_item_bytes
                # A server's own word for the type is often wrong; the data tells.
                found = File(await self._fetcher.fetch(found, f"{field}.url", most, held.reserve), image.mime_type)
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


def _checked(
    message: pb.GenerateRequest | pb.TokenizeRequest,
    asked: Sequence[AskedItem],
    recipe: Recipe | None,
    limits: MediaLimits,
) -> tuple[Recipe, pb.ItemOptions]:
    """Returns the model's recipe, and the options in force. Raises InvalidRequest."""
    if recipe is None:
        raise InvalidRequest(f"{asked[0].field} is set, and this model takes text only: leave it out")
    for each in asked:
        if recipe.placeholder(each.kind) is None:
            raise InvalidRequest(f"{each.field} is set, and this model takes none of this kind: leave it out")
    limits.check_asked(asked)
    return recipe, limits.resolved(
        message.item_options if isinstance(message, pb.GenerateRequest) else pb.ItemOptions()
    )


def read_here(message: pb.GenerateRequest, recipe: Recipe | None, limits: MediaLimits) -> list[ReadItem]:
    """Does what Items.read does, in one call and without fetching, for a model in this process. Raises
    InvalidRequest."""
    asked = asked_items(message)
    if not asked:
        return []
    recipe, options = _checked(message, asked, recipe, limits)
    read: list[ReadItem] = []
    for each in asked:
        files: list[File] = []
        for i, image in enumerate(each.images):
            found = inline_file(image, each.image_field(i))
            if isinstance(found, str):
                raise InvalidRequest(
                    f"{each.image_field(i)}.url={found[:200]!r}: nothing is fetched here, give the file"
                )
            files.append(found)
        read.append(read_item(each, files, options, recipe, limits))
    return read
