"""The images and videos of a request: which it has, and which a resume brings again."""

import functools
from collections.abc import Sequence
from typing import Protocol

from protos import inference_pb2 as pb
from router.errors import InvalidRequest, ItemsNeeded, MissingFeature
from router.request.media.asked import AskedItem, asked_items
from router.request.media.limits import MediaLimits
from router.request.media.read import ReadItem
from runtime.media.recipes.recipe import Recipe
from runtime.media.recipes.registry import recipe_from_json

# Recipes are large for models with a token for each tile; replicas of one model have one.
_recipe_of = functools.lru_cache(maxsize=8)(recipe_from_json)


class ItemReader(Protocol):
    """Where the files of one request are read, and held as long as it lasts: at a router, or in this process."""

    @property
    def limits(self) -> MediaLimits: ...

    async def read(self, asked: Sequence[AskedItem], options: pb.ItemOptions, recipe: Recipe) -> list[ReadItem]:
        """Raises RequestError."""
        ...

    def find(self, name: bytes) -> ReadItem | None:
        """Returns an item of the caller's that is here already."""
        ...


def recipe_of(media_json: str) -> Recipe:
    """Returns the recipe of a model. media_json: ModelInfo's.

    Raises MissingFeature for one that this version does not know.
    """
    try:
        return _recipe_of(media_json)
    except ValueError as error:
        raise MissingFeature(f"items: this router can't read the replicas' media_json ({error}): update it") from None


def check(message: pb.GenerateRequest) -> None:
    """Raises InvalidRequest. message: with items."""
    if message.HasField("chat") or message.suffix:
        where = "a chat has its items in parts of its messages" if message.HasField("chat") else "suffix is set, too"
        raise InvalidRequest(f"items has {len(message.items)} entries, and {where}: leave them out")


async def read_items(
    message: pb.GenerateRequest | pb.TokenizeRequest,
    asked: Sequence[AskedItem],
    recipe: Recipe | None,
    reader: ItemReader,
) -> list[ReadItem]:
    """Reads a message's items, which the reader holds from now on. asked: at least one. Raises RequestError."""
    if recipe is None:
        raise InvalidRequest(f"{asked[0].field} is set, and this model takes text only: leave it out")
    for each in asked:
        if recipe.placeholder(each.kind) is None:
            raise InvalidRequest(f"{each.field} is set, and this model takes none of this kind: leave it out")
    reader.limits.check_asked(asked)
    given = message.item_options if isinstance(message, pb.GenerateRequest) else pb.ItemOptions()
    return await reader.read(asked, reader.limits.resolved(given), recipe)


async def of_resume(message: pb.GenerateRequest, recipe: Recipe | None, reader: ItemReader) -> list[ReadItem]:
    """Returns the items of a resume, of message.resume.items. Raises ItemsNeeded if they are not here and the client
    has sent none, and other RequestErrors."""
    spans = message.resume.items
    if not spans:
        if message.items:
            raise InvalidRequest(f"items has {len(message.items)} entries, and resume.items none: give Started.items")
        return []
    if recipe is None:
        raise InvalidRequest(f"resume.items has {len(spans)} entries, and this model takes text only")
    if not message.items:
        found = [reader.find(span.name) for span in spans]
        missing = [i for i, item in enumerate(found) if item is None]
        if missing:
            raise ItemsNeeded(f"resume.items[{missing[0]}] is not at this router: send the request's items again")
        return [item for item in found if item is not None]
    if len(message.items) != len(spans):
        raise InvalidRequest(f"items has {len(message.items)} entries, and resume.items {len(spans)}: give all of them")
    read = await read_items(message, asked_items(message), recipe, reader)
    for i, (span, item) in enumerate(zip(spans, read, strict=True)):
        if span.name != item.packed.name:
            raise InvalidRequest(
                f"items[{i}] is not the item of resume.items[{i}]: send the same file, with the same item_options"
            )
    return read
