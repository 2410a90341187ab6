"""Builds a runner on a CPU from options: weights, KV cache, rows, warm-up, and a draft model."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from configs.options import Options
from kernels.backend import Backend
from kernels.cpu_backend import cpu_backend
from kernels.native.memory import populate_in_background
from runtime.model_files import resolve_model
from worker.cpu.cache_sizes import cache_sizes, items_share_cache
from worker.cpu.executor import CpuExecutor
from worker.cpu.head_build import load_cpu_head
from worker.cpu.runner import Runner
from worker.encoders.cache import EncoderCache
from worker.encoders.encoder import Encoder
from worker.encoders.items import Items
from worker.encoders.sizes import LOWER_LIMITS, MOST_BYTES_A_PIXEL, ItemMemory
from worker.errors import PermanentError
from worker.layers.forward_context import ExpertLoad
from worker.layers.kv_cache import KVCache
from worker.model_config import ModelConfig
from worker.models.drafting.draft_files import DraftSource, find_draft_model
from worker.models.drafting.drafter import Drafter
from worker.models.drafting.loading import LoadedDraft, load_draft
from worker.models.heads.source import find_head
from worker.models.info import (
    check_states,
    cpu_kernels,
    log_ready,
    make_rows,
    model_dtype,
    model_info,
    resolve_num_blocks,
    resolve_num_swap_blocks,
    wanted_items,
    with_block_size,
)
from worker.models.loader import load_model
from worker.parallel.axes import axes_of, experts_of, shard_of, stage_of
from worker.parallel.expert_exchange import check_experts
from worker.parallel.groups import without_others
from worker.sampling.grammar_engine import find_grammars
from worker.weights.cache import open_weight_cache


def load_draft_model(options: Options, source: DraftSource) -> LoadedDraft:
    """Loads the weights. Raises WeightsError."""
    cache = open_weight_cache(options.weight_cache)
    return load_draft(options, source, lambda loaded: CpuExecutor(loaded.model), cache=cache)


_log = logging.getLogger("octavo.worker")


def build_cpu_runner(
    options: Options,
    progress: Callable[[float], None] = lambda fraction: None,
    cores: Sequence[int] = (),
    *,
    replica: int = 0,
    rank: int = 0,
    watch_experts: Callable[[ExpertLoad], None] = lambda load: None,
) -> Runner:
    """Builds a runner on this CPU; see worker.process.build.build_runner."""
    start = time.monotonic()
    files = resolve_model(options.model)
    dtype, shard, stage = model_dtype(options), shard_of(options, rank), stage_of(options, rank)
    experts = experts_of(options, rank, replica)
    # Checked by all ranks, before they read weights; loaded by the one that sends results.
    draft_source = find_draft_model(options, files, lambda config, dtype: cpu_backend(dtype, config.head_size))
    last_stage = replace(stage, index=stage.size - 1)
    head_source = find_head(options, files, last_stage)
    drafts_here = shard.is_first and stage.is_last

    def make_backend(config: ModelConfig) -> Backend:
        check_experts(options, config)
        check_states(options, config)
        is_e4m3 = options.kv_cache_dtype in ("fp8", "fp8_e4m3")
        if is_e4m3 and config.latent is not None:
            raise PermanentError(
                f"kv_cache_dtype={options.kv_cache_dtype}: on a CPU {config.architecture} has latent attention in its "
                "own dtype: use auto"
            )
        backend = cpu_backend(dtype, config.head_size, torch.float8_e4m3fn if is_e4m3 else None)
        with_block_size(options, config, backend.kv_cache_dtype)
        return replace(backend, shard=shard, stage=stage, experts=experts)

    loaded = load_model(
        files,
        dtype=dtype,
        load_format=options.load_format,
        quantization=options.quantization,
        model_impl=options.model_impl,
        make_backend=make_backend,
        cache=open_weight_cache(options.weight_cache),
        max_model_len=options.max_model_len,
        items=wanted_items(options),
        progress=progress,
    )
    backend = loaded.model.backend
    options = with_block_size(options, loaded.config, backend.kv_cache_dtype)
    _log.info(
        "weights are loaded, in %.2f s: %.2f GiB, quantization %s, computed by %s",
        time.monotonic() - start,
        loaded.model.weight_bytes / 2**30,
        loaded.quantization,
        backend.name,
    )
    draft = load_draft_model(options, draft_source) if draft_source is not None and drafts_here else None
    head = load_cpu_head(options, head_source, loaded) if head_source is not None and drafts_here else None
    if backend.native is not None:
        # The C++ kernels have started their own threads by now. torch's threads would take the cores from them: they
        # spin for milliseconds after each op that they take part in.
        torch.set_num_threads(1)
        if cores:
            backend.native.bind_threads(cores)
    grammars = find_grammars(options, files, loaded.config, cores)
    loaded_drafter = draft or head
    num_blocks_beside = partial(
        resolve_num_blocks,
        options,
        loaded.config,
        backend.kv_cache_dtype,
        shard,
        stage,
        None if loaded_drafter is None else loaded_drafter.blocks,
    )
    encoder = loaded.encoder
    sizes = cache_sizes(
        options,
        loaded.config,
        num_blocks_beside,
        None if encoder is None else lambda most_tokens: ItemMemory.of(options, encoder, most_tokens),
    )
    num_blocks = sizes.num_blocks
    info = model_info(
        options,
        loaded,
        name=files.name,
        kernels=cpu_kernels(backend.name),
        num_blocks=num_blocks,
        max_model_len=sizes.max_model_len,
        grammars=grammars,
    )
    # One more block than can be allocated: block 0 is the null block.
    kv_cache = KVCache(loaded.config, num_blocks=num_blocks + 1, block_size=options.block_size, backend=backend)
    num_swap_blocks = resolve_num_swap_blocks(
        options, loaded.config, backend.kv_cache_dtype, shard, stage, 0 if head is None else head.blocks.block_bytes
    )
    rows = make_rows(options, loaded, info, grammars if stage.is_last else None)
    others = without_others(axes_of(options), rank, replica)
    kept_layers = () if head is None else head.source.config.kept_layers
    executor = CpuExecutor(loaded.model, kept_layers=kept_layers, keeps_states=head is not None)
    drafter: Drafter | None = None
    if draft is not None:
        drafter = draft.drafter(rows)
    elif head is not None:
        drafter = head.drafter(executor, rows)
    runner = Runner(
        executor,
        kv_cache,
        rows,
        info,
        num_swap_blocks=num_swap_blocks,
        without_others=others,
        max_steps_in_flight=options.max_steps_in_flight,
        drafter=drafter,
        items=None if encoder is None or sizes.items is None else _items(options, encoder, sizes.items),
    )
    runner.warm_up()
    if executor.expert_load is not None:
        executor.expert_load.clear()
        if backend.shard.is_first and backend.experts.is_first:
            watch_experts(executor.expert_load)
    log_ready(info, seconds=time.monotonic() - start, num_swap_blocks=num_swap_blocks)
    if options.populate_kv_cache:
        populate_in_background(kv_cache.layers, cores)
    return runner


def _items(options: Options, encoder: Encoder, memory: ItemMemory) -> Items:
    """Returns what this rank encodes items with."""
    sizes = memory.sizes
    _log.info(
        "images and videos: the encoder's weights take %.2f GiB, and items %.2f GiB, %s kv_cache_memory=%g; the "
        "largest of up to %d tokens is %s; to decode one image of max_item_pixels=%d takes up to %.2f GiB more",
        encoder.weight_bytes / 2**30,
        memory.num_bytes / 2**30,
        "of" if items_share_cache(options) else "beside",
        options.kv_cache_memory,
        sizes.most_tokens,
        sizes.description,
        options.max_item_pixels,
        _decoding_bytes(options) / 2**30,
    )
    if not items_share_cache(options):
        _warn_of_memory(options, memory)
    sizes.warn_of_refusals()
    cache = EncoderCache(sizes.cache_size, encoder.hidden_size, torch.float32, torch.device("cpu"))
    return Items(encoder, cache, most_input_bytes=sizes.input_bytes)


def _decoding_bytes(options: Options) -> int:
    """Returns the most that an image takes until it is resized; they are decoded one at a time."""
    return MOST_BYTES_A_PIXEL * options.max_item_pixels


def _warn_of_memory(options: Options, memory: ItemMemory) -> None:
    """Logs a warning if this machine may not have the memory of items beside that of KV blocks."""
    import psutil  # takes 20 ms, and most models have no items

    needed = memory.num_bytes + _decoding_bytes(options) + int(options.kv_cache_memory * 2**30)
    available = psutil.virtual_memory().available
    if needed > available:
        _log.warning(
            "the largest image or video, an image that is decoded and the KV blocks may take %.1f GiB together, and "
            "%.1f GiB are available: use a lower limit_mm_per_prompt, such as %s, or a lower max_model_len or "
            "max_item_pixels",
            needed / 2**30,
            available / 2**30,
            LOWER_LIMITS,
        )
