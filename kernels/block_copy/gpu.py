"""Block copy within a KV cache on a GPU, all layers in one launch.

Legend: L layers, N blocks, C blocks to copy.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernels.tiles.jit import jit

# 32-bit words of a block that a program copies: with 4 warps, four 16-byte vectors a thread, all loaded before the
# first is stored, so that 8 KiB are on their way.
_TILE = 2048
_NUM_WARPS = 4


class BlockCopy:
    """Copies blocks to other blocks of the same cache: a prefix that a sequence is about to write to, say."""

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        """layers: [N, ...] each, contiguous, all of one shape and dtype and on one device; keys and values may be
        layers of their own. They have to stay where they are. Raises ValueError for layers that differ, and for blocks
        whose bytes are no multiple of 4.
        """
        first = layers[0]
        for i, layer in enumerate(layers):
            if (layer.shape, layer.dtype, layer.device) != (first.shape, first.dtype, first.device):
                raise ValueError(
                    f"layer {i} is {tuple(layer.shape)} {layer.dtype} on {layer.device}, layer 0 "
                    f"{tuple(first.shape)} {first.dtype} on {first.device}; they have to be the same"
                )
            if not layer.is_contiguous() or layer.data_ptr() % 16:
                raise ValueError(f"layer {i} has to be contiguous, and to begin at a multiple of 16 bytes")
        block_bytes = first[0].numel() * first.element_size()
        if block_bytes % 4:
            raise ValueError(f"a block has {block_bytes} bytes; a multiple of 4 is expected")
        self._layers, self._block_words = tuple(layers), block_bytes // 4
        self._addresses_L = torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.int64, device=first.device)

    def __call__(self, pairs_C2: torch.Tensor) -> None:
        """block[pairs_C2[i, 1]] = block[pairs_C2[i, 0]] in every layer, for each i.

        pairs_C2: int32 or int64, contiguous, on the cache's device. A pair with a negative block copies nothing. The
        blocks written are all different, and none of them is read.
        """
        assert pairs_C2.is_contiguous()
        if len(pairs_C2):
            num_tiles = triton.cdiv(self._block_words, _TILE)
            _block_copy_kernel[(len(pairs_C2) * num_tiles, len(self._layers))](
                self._addresses_L, pairs_C2, self._block_words, num_tiles, TILE=_TILE, num_warps=_NUM_WARPS
            )


@jit
def _block_copy_kernel(addresses_L, pairs_C2, block_words, num_tiles, TILE: tl.constexpr):
    # One number as a tensor, not a scalar: the interpreter makes integers of a scalar's comparisons when it spreads
    # them.
    pair = tl.program_id(0) // num_tiles + tl.arange(0, 1)
    words = tl.program_id(0) % num_tiles * TILE + tl.arange(0, TILE)
    source = tl.load(pairs_C2 + pair * 2).to(tl.int64)
    target = tl.load(pairs_C2 + pair * 2 + 1).to(tl.int64)
    layer = tl.multiple_of(tl.load(addresses_L + tl.program_id(1)).to(tl.pointer_type(tl.int32)), 16)
    mask = (words < block_words) & (source >= 0) & (target >= 0)
    tl.store(layer + target * block_words + words, tl.load(layer + source * block_words + words, mask=mask), mask=mask)
