"""Builds a runner on a GPU from options: weights, KV cache in the memory that is left, graphs."""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from configs.options import Options
from configs.quantization import KINDS
from kernels.backend import Backend, gpu_backend
from kernels.kv_cache.layout import HEAD_SIZES
from runtime.model_files import ModelFiles, resolve_model
from worker.device.device import Device
from worker.errors import PermanentError, StepError
from worker.gpu.components import Components
from worker.gpu.engine import GpuEngine
from worker.gpu.executor import GpuDraftExecutor, GpuExecutor
from worker.gpu.memory import (
    MemoryUse,
    account,
    num_kv_blocks,
    out_of_memory,
    serving_needs_more,
    start_needs_more,
    weights_need_more,
)
from worker.gpu.pending import PendingStep
from worker.gpu.runner import GpuRunner
from worker.model_config import ModelConfig
from worker.models.drafting.draft_files import DraftSource, find_draft_model
from worker.models.drafting.draft_model import DraftModel
from worker.models.drafting.loading import LoadedDraft, load_draft
from worker.models.heads.source import refuse_heads
from worker.models.info import (
    gpu_kernels,
    log_ready,
    make_rows,
    model_dtype,
    model_info,
    refuse_states_on_gpus,
    resolve_max_model_len,
    wanted_items,
    with_block_size,
)
from worker.models.loader import LoadedModel, config_of, load_model
from worker.models.registry import model_of
from worker.parallel.axes import axes_of, experts_of, shard_of
from worker.parallel.expert_exchange import check_experts
from worker.parallel.groups import Groups, without_others
from worker.sampling.grammar_engine import find_grammars
from worker.step.inputs import StepInputs
from worker.weights.quantization.kinds import Quantization, resolve_quantization

# Embeddings and the head are never quantized.
_KEPT = ("model.embed_tokens.weight", "lm_head.weight")


def weight_bytes(config: ModelConfig, dtype: torch.dtype, quantization: Quantization = "none") -> int:
    """Bytes of all weights; linear layers have the bytes of their quantization."""
    total = 0
    for name, shape in model_of(config).tensor_shapes(config).items():
        if quantization != "none" and len(shape) > 1 and name not in _KEPT:
            total += math.prod(shape[:-1]) * KINDS[quantization].row_bytes(math.prod(shape[-1:]))
        else:
            total += math.prod(shape) * dtype.itemsize
    return total


class GuardedEngine:
    """A worker.gpu.runner.Engine that explains a lack of memory. Only `begin` can run into it: steps in flight already
    have their memory."""

    def __init__(self, engine: GpuEngine, device: Device, options: Options, use: MemoryUse) -> None:
        """use: as measured at the start."""
        self._engine, self._device, self._options, self._use = engine, device, options, use

    def begin(self, inputs: StepInputs) -> PendingStep:
        """Begins a step. Raises StepError if GPU memory runs out."""
        with out_of_memory(lambda: serving_needs_more(self._options, self._device.memory(), self._use)):
            return self._engine.begin(inputs)

    def reset(self) -> None:
        self._engine.reset()


_log = logging.getLogger("octavo.worker")

# None: the model's compute dtype.
_KV_CACHE_DTYPES = {
    "auto": None,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
}


def build_gpu_runner(
    options: Options,
    device: Device,
    progress: Callable[[float], None] = lambda fraction: None,
    *,
    replica: int = 0,
    rank: int = 0,
) -> GpuRunner:
    """Builds a runner on a GPU; see worker.process.build.build_runner. Raises PermanentError if memory is short, with
    the option to lower."""
    start = time.monotonic()
    files = resolve_model(options.model)
    refuse_heads(options)
    make_draft_backend = partial(_make_draft_backend, options, device)
    # Checked by all ranks, before they read weights; loaded by the one that sends results.
    draft_source = find_draft_model(options, files, make_draft_backend)
    with out_of_memory(lambda: _weights_error(options, device, files, rank)):
        loaded = load_model(
            files,
            dtype=model_dtype(options),
            load_format=options.load_format,
            quantization=options.quantization,
            model_impl=options.model_impl,
            make_backend=partial(_make_backend, options, device, rank=rank),
            max_model_len=options.max_model_len,
            items=wanted_items(options),
            progress=progress,
        )
    backend = loaded.model.backend
    _log.info(
        "weights are loaded on %s, in %.2f s: %.2f GiB, quantization %s, computed by %s",
        device.name,
        time.monotonic() - start,
        loaded.model.weight_bytes / 2**30,
        loaded.quantization,
        backend.name,
    )
    draft = None
    if draft_source is not None and backend.shard.is_first:
        with out_of_memory(lambda: _weights_error(options, device, draft_source.files, rank)):
            draft = _load_draft(options, draft_source, make_draft_backend)
    # Most of the remaining time goes into compiling kernels.
    progress(1.0)
    axes = axes_of(options)
    others = without_others(axes, rank, replica) if axes.num_ranks > 1 else Groups()
    parts = Components(options, device, loaded, GpuExecutor(loaded.model, others))
    use = parts.measure()
    progress(1.0)
    grammars = find_grammars(options, files, loaded.config)
    block_bytes = parts.block_bytes
    if draft is not None:
        block_bytes += draft.blocks.block_bytes
        use = replace(use, step=use.step + draft.blocks.num_spare * draft.blocks.block_bytes)
    num_blocks = num_kv_blocks(use, options, block_bytes)
    info = model_info(
        options,
        loaded,
        name=files.name,
        kernels=gpu_kernels(backend.name, device.name),
        num_blocks=num_blocks,
        max_model_len=resolve_max_model_len(options, loaded.config, num_blocks, on_gpu=True),
        grammars=grammars,
    )
    if not options.num_blocks_override:
        _log.info("%s", account(use, options, info, block_bytes))
    # One more block than can be allocated: block 0 is the null block.
    kv_cache = parts.kv_cache(num_blocks + 1, use)
    with out_of_memory(lambda: start_needs_more(options, device.memory(), use)):
        engine = parts.engine(kv_cache, info.max_model_len)
    progress(1.0)
    ranks = None
    if axes.num_ranks > 1:
        ranks = parts.ranks(engine, kv_cache, others)
    else:
        engine.graphs = parts.capture(engine, kv_cache)
    rows = make_rows(options, loaded, info, grammars)
    with out_of_memory(lambda: start_needs_more(options, device.memory(), use)):
        drafter = None if draft is None else draft.drafter(rows)
    runner = GpuRunner(
        GuardedEngine(engine, device, options, use),
        rows,
        info,
        swap_space=parts.swap_space(kv_cache),
        max_steps_in_flight=options.max_steps_in_flight,
        device=device,
        ranks=ranks,
        drafter=drafter,
        items=parts.items(use),
    )
    try:
        runner.warm_up()
    except StepError as error:
        raise PermanentError(str(error)) from error
    log_ready(info, seconds=time.monotonic() - start, num_swap_blocks=runner.num_swap_blocks)
    return runner


def _check_heads(options: Options, config: ModelConfig) -> None:
    refuse_states_on_gpus(options, config)
    with_block_size(options, config, model_dtype(options), on_gpu=True)
    if config.latent is not None:
        try:
            config.latent.shape(config.num_heads).check_for_gpus()
        except ValueError as error:
            raise PermanentError(f"device={options.device}: {error}; device=cpu has no such limit") from None
    elif config.head_size not in HEAD_SIZES:
        raise PermanentError(
            f"device={options.device}: the model's head size is {config.head_size}, and attention on GPUs supports "
            f"{', '.join(map(str, HEAD_SIZES))}; device=cpu has no such limit"
        )


def _make_backend(options: Options, device: Device, config: ModelConfig, *, rank: int) -> Backend:
    _check_heads(options, config)
    check_experts(options, config)
    backend = gpu_backend(
        model_dtype(options),
        device.torch_device,
        kv_cache_dtype=_KV_CACHE_DTYPES[options.kv_cache_dtype],
        batch_invariant=options.batch_invariant,
    )
    return replace(backend, shard=shard_of(options, rank), experts=experts_of(options, rank))


def _make_draft_backend(options: Options, device: Device, config: ModelConfig, dtype: torch.dtype) -> Backend:
    """The backend of a whole model on this rank."""
    _check_heads(options, config)
    return gpu_backend(dtype, device.torch_device, batch_invariant=options.batch_invariant)


def _load_draft(
    options: Options, source: DraftSource, make_backend: Callable[[ModelConfig, torch.dtype], Backend]
) -> LoadedDraft:
    """Loads a draft model, and reserves the memory of its passes. make_backend: as for find_draft_model."""
    context = source.config.max_position_embeddings

    def make_executor(loaded: LoadedModel) -> GpuDraftExecutor:
        return GpuDraftExecutor(
            GpuExecutor(loaded.model),
            vocab_size=loaded.config.vocab_size,
            max_tokens=DraftModel.most_tokens(options.max_num_seqs),
            max_rows=options.max_num_seqs,
            max_context=min(options.max_model_len or context, context),
        )

    return load_draft(options, source, make_executor, make_backend=lambda config: make_backend(config, source.dtype))


def _weights_error(options: Options, device: Device, files: ModelFiles, rank: int) -> PermanentError:
    (config, made_for), dtype = config_of(files, options.model_impl), model_dtype(options)
    backend = _make_backend(options, device, config, rank=rank)
    quantization = resolve_quantization(options.quantization, made_for, backend)
    return weights_need_more(
        options,
        device.memory(),
        # A rank's part. A little too low: every rank has the norms whole.
        needed=weight_bytes(config, dtype, quantization) // backend.shard.size,
        as_fp8=weight_bytes(config, dtype, "fp8") // backend.shard.size,
    )
