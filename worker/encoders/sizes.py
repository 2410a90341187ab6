"""How large the items of a replica can be, and the memory that they take on a rank."""

import logging
import math
from dataclasses import dataclass

import torch

from configs.options import Options
from protos.inference_pb2 import ITEM_KIND_VIDEO
from runtime.media.recipes.recipe import ItemSize
from worker.encoders.cache import EncoderCache
from worker.encoders.encoder import Encoder

_log = logging.getLogger("octavo.worker")

# Schedulers ask for inputs of so many times encoder_cache_size embeddings ahead of their turn.
_INPUTS = 2
# What an image takes while it is decoded, for each pixel in its file: libwebp has two canvases and the pixels that it
# decodes, Pillow two copies. Other formats take 12 at most.
MOST_BYTES_A_PIXEL = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemSizes:
    """The largest item that limit_mm_per_prompt allows, and what is kept of items."""

    largest: ItemSize
    # Tokens of the longest prompt, which the largest item must fit into.
    most_tokens: int
    # Embeddings of the largest item, and of the cache.
    num_embeddings: int
    cache_size: int
    # Bytes of the inputs that may wait to be encoded.
    input_bytes: int
    # Bytes of the cache.
    cache_bytes: int

    @property
    def description(self) -> str:
        """For logs and errors."""
        size = self.largest
        what = f"a video of {size.num_frames} frames" if size.kind == ITEM_KIND_VIDEO else "an image"
        return f"{what} of {size.width} x {size.height} pixels, {self.num_embeddings} embeddings"

    def warn_of_refusals(self) -> None:
        """Logs a warning if items within limit_mm_per_prompt will be refused."""
        if self.cache_size < self.num_embeddings:
            _log.warning(
                "encoder_cache_size=%d: items of more embeddings are refused, and limit_mm_per_prompt allows ones of "
                "%d",
                self.cache_size,
                self.num_embeddings,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemMemory:
    """Bytes that items take on a CPU worker."""

    sizes: ItemSizes
    # The encoder's work on the largest item.
    workspace_bytes: int

    @classmethod
    def of(cls, options: Options, encoder: Encoder, most_tokens: int) -> "ItemMemory | None":
        """most_tokens: of the longest prompt. None: limit_mm_per_prompt allows no item that the model takes."""
        sizes = item_sizes(options, encoder, torch.float32, most_tokens)
        return None if sizes is None else cls(sizes=sizes, workspace_bytes=encoder.workspace_bytes(sizes.largest))

    @property
    def num_bytes(self) -> int:
        return self.sizes.cache_bytes + self.sizes.input_bytes + self.workspace_bytes

    def no_room(self, options: Options) -> str:
        """Returns why there is no room for KV blocks, and what would work."""
        sizes = self.sizes
        least = math.ceil(10 * (self.num_bytes / 2**30 + options.kv_cache_memory)) / 10
        return (
            f"kv_cache_memory={options.kv_cache_memory:g} GiB has no room for KV blocks beside images and videos, "
            f"which take {_gib(self.num_bytes)} GiB: {_gib(self.workspace_bytes)} to encode {sizes.description}, "
            f"{_gib(sizes.input_bytes)} for inputs, {_gib(sizes.cache_bytes)} for encoder_cache_size="
            f"{sizes.cache_size}; use a lower limit_mm_per_prompt, such as {LOWER_LIMITS}, or mm_processor_kwargs with "
            f"lower max_pixels, or kv_cache_memory={least:g}"
        )


# For messages.
LOWER_LIMITS = '{"image": {"count": 1, "width": 640, "height": 480}, "video": 0}'


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f}"


def item_sizes(options: Options, encoder: Encoder, dtype: torch.dtype, most_tokens: int) -> ItemSizes | None:
    """Returns the sizes of a replica's items; None: limit_mm_per_prompt allows none that the model takes. dtype: of the
    cache. most_tokens: of the longest prompt; no item of more tokens can be in one."""
    limits = options.limit_mm_per_prompt
    largest = encoder.largest(limits, most_tokens)
    if largest is None:
        return None
    num_embeddings = encoder.recipe.layout(largest).num_embeddings
    budget = max(options.max_num_encoder_input_tokens or options.max_num_batched_tokens, num_embeddings)
    cache_size = options.encoder_cache_size or budget
    most_inputs = options.max_num_seqs * (limits.image.count + limits.video.count) * num_embeddings
    num_inputs = max(num_embeddings, min(_INPUTS * cache_size, most_inputs))
    return ItemSizes(
        largest=largest,
        most_tokens=most_tokens,
        num_embeddings=num_embeddings,
        cache_size=cache_size,
        input_bytes=num_inputs * encoder.dummy(largest).num_bytes // num_embeddings,
        cache_bytes=EncoderCache.num_bytes(cache_size, encoder.hidden_size, dtype),
    )
