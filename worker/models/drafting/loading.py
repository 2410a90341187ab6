"""Loads a draft model, whole, on the rank that samples."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from configs.options import Options
from kernels.backend import Backend
from worker.layers.kv_cache import DrafterBlocks, KVCache
from worker.model_config import ModelConfig
from worker.models.drafting.draft_files import DraftSource
from worker.models.drafting.draft_model import DraftExecutor, DraftModel
from worker.models.loader import LoadedModel, load_model
from worker.step.rows import Rows
from worker.weights.cache import WeightCache

_log = logging.getLogger("octavo.worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedDraft:
    source: DraftSource
    executor: DraftExecutor
    blocks: DrafterBlocks

    def drafter(self, rows: Rows) -> DraftModel:
        """Makes the drafter of a runner's rows, with a KV cache."""
        config = self.source.config
        kv_cache = KVCache(
            config,
            num_blocks=rows.num_blocks + 1 + self.blocks.num_spare,
            block_size=rows.block_size,
            backend=self.executor.backend,
        )
        return DraftModel(
            self.source.name,
            self.executor,
            kv_cache,
            rows,
            max_drafts=self.source.max_drafts,
            max_len=config.max_position_embeddings,
            vocab_size=config.vocab_size,
        )


def load_draft(
    options: Options,
    source: DraftSource,
    make_executor: Callable[[LoadedModel], DraftExecutor],
    *,
    make_backend: Callable[[ModelConfig], Backend] | None = None,
    cache: WeightCache | None = None,
) -> LoadedDraft:
    """Loads the weights; see load_model. Raises WeightsError."""
    start = time.monotonic()
    loaded = load_model(
        source.files,
        dtype=source.dtype,
        load_format="dummy" if options.load_format == "dummy" else "auto",
        quantization=source.quantization,
        model_impl="octavo" if source.config.library is None else "transformers",
        make_backend=make_backend,
        cache=cache,
    )
    backend = loaded.model.backend
    _log.info(
        "the draft model %s is loaded, in %.2f s: %.2f GiB, computed by %s",
        source.name,
        time.monotonic() - start,
        loaded.model.weight_bytes / 2**30,
        backend.name,
    )
    blocks = DrafterBlocks(
        block_bytes=KVCache.block_bytes(loaded.config, options.block_size, backend.kv_cache_dtype),
        num_spare=DraftModel.num_spare(options.max_num_seqs, source.max_drafts, options.block_size),
    )
    return LoadedDraft(source=source, executor=make_executor(loaded), blocks=blocks)
