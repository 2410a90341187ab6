"""How much memory a CPU worker has for KV blocks and for images and videos.

The largest item depends on the longest prompt, the longest prompt on the number of KV blocks, and that, if items take
of kv_cache_memory, on the largest item.
"""

from collections.abc import Callable
from dataclasses import dataclass

from configs.options import Options
from worker.encoders.sizes import ItemMemory
from worker.errors import PermanentError
from worker.model_config import ModelConfig
from worker.models.info import longest_sequence, resolve_max_model_len


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSizes:
    # Without the null block.
    num_blocks: int
    max_model_len: int
    # None: this rank encodes no items.
    items: ItemMemory | None = None


def items_share_cache(options: Options) -> bool:
    """True if items take of kv_cache_memory. If the user has not given it, its default is for KV blocks alone, and the
    memory of items comes on top: else many a model would not start without further options."""
    return "kv_cache_memory" in options.model_fields_set and not options.num_blocks_override


def cache_sizes(
    options: Options,
    config: ModelConfig,
    num_blocks_beside: Callable[[int], int],
    items_of: Callable[[int], ItemMemory | None] | None = None,
) -> CacheSizes:
    """Returns what a worker allocates.

    num_blocks_beside: returns the number of blocks if so many bytes of kv_cache_memory are taken, and raises ValueError
    if there is no room. items_of: returns the memory of items in prompts of up to so many tokens; None: this rank
    encodes none. Raises PermanentError or ValueError, naming the option, if there is not enough memory.
    """
    if items_of is not None and items_share_cache(options):
        return _shared(options, config, num_blocks_beside, items_of)
    num_blocks = num_blocks_beside(0)
    longest = resolve_max_model_len(options, config, num_blocks)
    items = None if items_of is None else items_of(longest)
    return CacheSizes(num_blocks=num_blocks, max_model_len=longest, items=items)


def _shared(
    options: Options,
    config: ModelConfig,
    num_blocks_beside: Callable[[int], int],
    items_of: Callable[[int], ItemMemory | None],
) -> CacheSizes:
    """max_model_len, if it is not given, becomes the most tokens for which there are KV blocks beside the largest item
    of as many tokens."""

    def held(num_tokens: int) -> int:
        """Returns how many tokens the KV cache holds beside items of up to num_tokens."""
        items = items_of(num_tokens)
        try:
            return num_blocks_beside(0 if items is None else items.num_bytes) * options.block_size
        except ValueError:
            return 0

    longest = longest_sequence(options, config)
    if not options.max_model_len and held(longest) < longest:
        longest = _most(held, longest)
    items = items_of(longest)
    try:
        num_blocks = num_blocks_beside(0 if items is None else items.num_bytes)
    except ValueError as error:
        raise error if items is None else PermanentError(items.no_room(options)) from None
    longest = resolve_max_model_len(options, config, num_blocks, most_tokens=longest)
    return CacheSizes(num_blocks=num_blocks, max_model_len=longest, items=items)


def _most(held: Callable[[int], int], beyond: int) -> int:
    """Returns the largest number below `beyond` that is held, at least 1. held: does not grow with its argument."""
    least = 1
    while beyond - least > 1:
        middle = (least + beyond) // 2
        if held(middle) >= middle:
            least = middle
        else:
            beyond = middle
    return least
