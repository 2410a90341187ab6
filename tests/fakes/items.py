"""Items for tests of the scheduling core: a few small ones, placed anywhere in a prompt."""

from random import Random

from scheduler.core.messages import ItemSpan

NUM_ITEMS = 6
# What stands for an item's embedding in digests: above all token ids, and another one at each place in the item.
_FIRST_EMBEDDING = 1 << 12
_MOST_TOKENS = 16


def item_name(index: int) -> bytes:
    return bytes([index]) * 32


def item_span(index: int, first_token: int) -> ItemSpan:
    """One of NUM_ITEMS items. They have 1 to 9 tokens, most of them with an embedding."""
    num_tokens = 1 + (index * 5) % 11 % 9
    return ItemSpan(
        name=item_name(index),
        first_token=first_token,
        num_tokens=num_tokens,
        num_embeddings=max(1, num_tokens - index % 2),
        grid=(1, 1, num_tokens),
    )


def with_embeddings(prompt: tuple[int, ...], items: tuple[ItemSpan, ...]) -> tuple[int, ...]:
    """The prompt as a model sees it: what it computes depends on the items, which token ids do not tell."""
    seen = list(prompt)
    for span in items:
        for place in range(span.num_tokens):
            seen[span.first_token + place] = _FIRST_EMBEDDING + span.name[0] * _MOST_TOKENS + place
    return tuple(seen)


def random_items(choose: Random, num_prompt_tokens: int) -> tuple[ItemSpan, ...]:
    """One to three items with gaps between them, as far as the prompt has room."""
    spans: list[ItemSpan] = []
    first = choose.choice([0, 0, 1, 3, 5])
    for _ in range(choose.randint(1, 3)):
        span = item_span(choose.randrange(NUM_ITEMS), first)
        if span.end > num_prompt_tokens:
            break
        spans.append(span)
        first = span.end + choose.choice([0, 0, 1, 4])
    return tuple(spans)
