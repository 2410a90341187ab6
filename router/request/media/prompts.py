"""Prompts with items: one placeholder token stands for each until it is replaced by the tokens of the item's layout."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from protos import inference_pb2 as pb
from router.errors import InvalidRequest
from router.request.media.limits import KINDS
from router.request.media.read import ReadItem
from runtime.media.recipes.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: list[int]
    # Those of its items, in order, and their files.
    spans: tuple[pb.ItemSpan, ...] = ()
    items: tuple[ReadItem, ...] = ()


def placeholders_of(recipe: Recipe) -> dict[int, list[pb.ItemKind]]:
    """Returns the kinds that each placeholder token stands for."""
    found: dict[int, list[pb.ItemKind]] = {}
    for kind in KINDS:
        if (token_id := recipe.placeholder(kind)) is not None:
            found.setdefault(token_id, []).append(kind)
    return found


def num_tokens(num_prompt_tokens: int, items: Sequence[ReadItem]) -> int:
    """Returns the length of a prompt whose items are placeholders, once they are replaced."""
    return num_prompt_tokens + sum(len(item.layout.token_ids) - 1 for item in items)


def expanded(token_ids: Sequence[int], items: Sequence[ReadItem], recipe: Recipe, *, source: str) -> Prompt:
    """Replaces each placeholder by an item's tokens; the items of a kind come in the order of its placeholders.

    source: what has written the placeholders, for errors. Raises InvalidRequest if their numbers differ.
    """
    waiting = {
        token_id: [item for item in items if item.packed.kind in kinds]
        for token_id, kinds in placeholders_of(recipe).items()
    }
    for token_id, own in waiting.items():
        # Lists count fast, protobuf's sequences do not.
        if (found := list(token_ids).count(token_id)) != len(own):
            kinds = " and ".join(f"{KINDS[kind]}s" for kind in placeholders_of(recipe)[token_id])
            raise InvalidRequest(
                f"{source} has {found} placeholders for {kinds} (token {token_id}), and the request has {len(own)}: "
                "give one placeholder for each"
            )
    built: list[int] = []
    spans: list[pb.ItemSpan] = []
    ordered: list[ReadItem] = []
    begin = 0
    for position, token_id in _places(token_ids, waiting.keys()):
        item = waiting[token_id].pop(0)
        built += token_ids[begin:position]
        spans.append(item.span(len(built)))
        ordered.append(item)
        built += item.layout.token_ids
        begin = position + 1
    built += token_ids[begin:]
    return Prompt(built, tuple(spans), tuple(ordered))


def _places(token_ids: Sequence[int], wanted: Iterable[int]) -> list[tuple[int, int]]:
    """Returns position and token of each placeholder, in order."""
    places: list[tuple[int, int]] = []
    for token_id in wanted:
        position = -1
        try:
            while True:
                position = token_ids.index(token_id, position + 1)
                places.append((position, token_id))
        except ValueError:
            pass
    return sorted(places)


def cut(prompt: Prompt, begin: int, end: int) -> Prompt:
    """Returns the tokens from `begin` to `end`, without an item that would be cut in two."""
    for span in prompt.spans:
        last = span.first_token + span.num_tokens
        if span.first_token < begin < last:
            begin = last
        if span.first_token < end < last:
            end = span.first_token
    kept = [
        (span, item)
        for span, item in zip(prompt.spans, prompt.items, strict=True)
        if span.first_token >= begin and span.first_token + span.num_tokens <= end
    ]
    moved: list[pb.ItemSpan] = []
    for span, _ in kept:
        own = pb.ItemSpan()
        own.CopyFrom(span)
        own.first_token -= begin
        moved.append(own)
    return Prompt(prompt.token_ids[begin:end], tuple(moved), tuple(item for _, item in kept))


def check_resumed(
    token_ids: Sequence[int], spans: Sequence[pb.ItemSpan], items: Sequence[ReadItem], recipe: Recipe
) -> Prompt:
    """Checks what a resume says of its items against the items themselves. Raises InvalidRequest."""
    ids, end = list(token_ids), 0
    outside: list[int] = []
    for i, (span, item) in enumerate(zip(spans, items, strict=True)):
        own = item.span(span.first_token)
        if span.first_token < end:
            raise InvalidRequest(
                f"resume.items[{i}].first_token={span.first_token} is within the item before: give Started.items"
            )
        if span != own:
            raise InvalidRequest(f"resume.items[{i}] is not as this item is here: give Started.items as they came")
        outside += ids[end : span.first_token]
        end = span.first_token + span.num_tokens
        if ids[span.first_token : end] != list(item.layout.token_ids):
            raise InvalidRequest(
                f"resume.prompt_token_ids do not have the tokens of resume.items[{i}] at {span.first_token}: give "
                "Started.prompt_token_ids and Started.items as they came"
            )
    outside += ids[end:]
    check_no_placeholders(outside, recipe)
    return Prompt(
        ids, tuple(item.span(span.first_token) for span, item in zip(spans, items, strict=True)), tuple(items)
    )


def check_no_placeholders(token_ids: Sequence[int], recipe: Recipe) -> None:
    """Refuses a resumed prompt with placeholders outside of its items. Raises InvalidRequest."""
    for kind, name in KINDS.items():
        if recipe.placeholder(kind) is not None and recipe.embedded(kind) in token_ids:
            raise InvalidRequest(
                f"resume.prompt_token_ids has the token {recipe.embedded(kind)} of {name}s outside of resume.items: "
                "give Started.items as they came"
            )
