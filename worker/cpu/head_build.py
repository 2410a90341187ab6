"""Loads a drafting head on a CPU, on the rank that samples."""

import logging
import time
from dataclasses import dataclass

from configs.options import Options
from worker.cpu.executor import CpuExecutor
from worker.cpu.head_drafter import HeadDrafter, spare_blocks_of_row
from worker.cpu.heads import CpuHead
from worker.layers.kv_cache import DrafterBlocks, KVCache
from worker.models.heads.source import HeadSource
from worker.models.loader import LoadedModel
from worker.step.rows import Rows

_log = logging.getLogger("octavo.worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedHead:
    source: HeadSource
    head: CpuHead
    blocks: DrafterBlocks

    def drafter(self, target: CpuExecutor, rows: Rows) -> HeadDrafter:
        """Makes the drafter of a runner's rows, with a KV cache. target: keeps the layers that the head reads."""
        return HeadDrafter(self.source.name, self.head, target, rows, max_drafts=self.source.max_drafts)


def load_cpu_head(options: Options, source: HeadSource, target: LoadedModel) -> LoadedHead:
    """Loads the weights. Raises WeightsError."""
    start = time.monotonic()
    head = source.load(target)
    _log.info("the head %s is loaded, in %.2f s", source.name, time.monotonic() - start)
    blocks = DrafterBlocks(
        block_bytes=KVCache.block_bytes(head.config.layers, options.block_size, head.backend.kv_cache_dtype),
        num_spare=options.max_num_seqs * spare_blocks_of_row(source.max_drafts, options.block_size),
    )
    return LoadedHead(source=source, head=CpuHead(head), blocks=blocks)
