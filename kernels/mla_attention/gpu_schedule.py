"""Which program computes what of a step of MLA, decided on the GPU."""

import torch

from kernels.mla_attention.gpu_tiles import chunk_of, head_groups, mla_tiles
from kernels.mla_attention.shape import LatentShape
from kernels.paged_attention.gpu_schedule import WORKSPACE_BYTES, AttentionSchedule, tile_arch


class MlaSchedule(AttentionSchedule):
    """A step's, for all layers of one shape, in memory that stays where it is. `update` makes it another step's.

    As kernels.paged_attention has it: groups of heads stand for its KV heads. One program computes decodes and prompts
    alike, so a query's result has the same bits in any batch and however its row is cut: batch_invariant, in any case.
    """

    def __init__(
        self,
        shape: LatentShape,
        *,
        max_num_seqs: int,
        max_context_len: int,
        cache_dtype: torch.dtype,
        device: torch.device | str,
        queries_per_tile: int = 1,
        chunk: int | None = None,
        num_programs: int | None = None,
        workspace_bytes: int = WORKSPACE_BYTES,
    ) -> None:
        """queries_per_tile: of a row, that read its entries together where there are lanes for them: 1 and as many as a
        step verifies drafts. chunk: tokens of a partition, a multiple of 128; None: as the lanes need it.

        Raises ValueError for sizes that the kernel doesn't know.
        """
        shape.check_for_gpus()
        tiles = mla_tiles(shape, cache_dtype, tile_arch(device), queries_per_tile=queries_per_tile)
        super().__init__(
            head_groups(shape, tiles.lanes),
            max_num_seqs=max_num_seqs,
            max_context_len=max_context_len,
            cache_dtype=cache_dtype,
            device=device,
            tiles=tiles,
            chunk=chunk or chunk_of(tiles.lanes),
            num_programs=num_programs,
            workspace_bytes=workspace_bytes,
        )
        self.shape = shape
        # Of each program, for chunks that it folds itself: the sums so far, and a chunk's.
        self.own_values = torch.empty(
            self.num_programs, 2, tiles.lanes, shape.latent_size, dtype=torch.float32, device=device
        )
