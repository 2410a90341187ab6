"""From options to a runner on a GPU: weights, what they leave of the memory, graphs."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from configs.options import Options
from kernels.compute_path import ComputePath, gpu_path
from kernels.paged_attention.gpu_cache import HEAD_SIZES
from runtime.model_files import ModelFiles, resolve_model
from worker.capacity import resolve_max_model_len
from worker.errors import PermanentError, StepError
from worker.fingerprint import gpu_kernels
from worker.gpu.device import Device
from worker.gpu.memory.guarded_engine import GuardedEngine
from worker.gpu.memory.out_of_memory import out_of_memory, start_needs_more, weights_need_more
from worker.gpu.memory.use import account, num_kv_blocks
from worker.gpu.memory.weight_bytes import config_of, weight_bytes
from worker.gpu.parts import Parts
from worker.gpu.runner import GpuRunner
from worker.model_config import ModelConfig
from worker.model_info import log_ready, make_rows, model_dtype, model_info
from worker.parallel.experts import check_experts
from worker.parallel.groups import without_others
from worker.parallel.places import axes_of, experts_of, shard_of
from worker.weights import load_model
from worker.weights.quantization import resolve_quantization

_log = logging.getLogger("octavo.worker")

# None: as the model computes.
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
    """As worker.build.build_runner, on a GPU. Raises PermanentError, too, if memory is lacking: what to lower."""
    start = time.monotonic()
    files = resolve_model(options.model)
    with out_of_memory(lambda: _weights_error(options, device, files, rank)):
        loaded = load_model(
            files,
            dtype=model_dtype(options),
            load_format=options.load_format,
            quantization=options.quantization,
            make_path=partial(_make_path, options, device, rank=rank),
            progress=progress,
        )
    path = loaded.model.path
    _log.info(
        "weights are loaded on %s, in %.2f s: %.2f GiB, quantization %s, computed by %s",
        device.name, time.monotonic() - start, loaded.model.weight_bytes / 2**30, loaded.quantization, path.name,
    )  # fmt: skip
    # What follows is compiling kernels, most of it.
    progress(1.0)
    axes = axes_of(options)
    if axes.num_ranks > 1:
        loaded.model.groups = without_others(axes, rank, replica)
    parts = Parts(options, device, loaded)
    use = parts.measure()
    progress(1.0)
    num_blocks = num_kv_blocks(use, options, parts.block_bytes)
    info = model_info(
        options,
        loaded,
        name=files.name,
        kernels=gpu_kernels(path.name, device.name),
        num_blocks=num_blocks,
        max_model_len=resolve_max_model_len(options, loaded.config, num_blocks, on_gpu=True),
    )
    if not options.num_blocks_override:
        _log.info("%s", account(use, options, info, parts.block_bytes))
    # Block 0, the null block, comes on top of those that can be given out.
    kv_cache = parts.kv_cache(num_blocks + 1, use)
    with out_of_memory(lambda: start_needs_more(options, device.memory(), use)):
        engine = parts.engine(kv_cache, info.max_model_len)
    progress(1.0)
    ranks = None
    if axes.num_ranks > 1:
        ranks = parts.ranks(engine, kv_cache, loaded.model.groups)
    else:
        engine.graphs = parts.capture(engine, kv_cache)
    runner = GpuRunner(
        GuardedEngine(engine, device, options, use),
        make_rows(options, loaded, info),
        info,
        swap_space=parts.swap_space(kv_cache),
        max_steps_in_flight=options.max_steps_in_flight,
        ranks=ranks,
    )
    try:
        runner.warm_up()
    except StepError as error:
        raise PermanentError(str(error)) from error
    log_ready(info, seconds=time.monotonic() - start, num_swap_blocks=runner.num_swap_blocks)
    return runner


def _make_path(options: Options, device: Device, config: ModelConfig, *, rank: int) -> ComputePath:
    if config.latent is not None:
        try:
            config.latent.shape(config.num_heads).check_for_gpus()
        except ValueError as error:
            raise PermanentError(f"device={options.device}: {error}; device=cpu computes any") from None
    elif config.head_size not in HEAD_SIZES:
        raise PermanentError(
            f"device={options.device}: the model's heads have {config.head_size} numbers, and the GPU's attention "
            f"computes heads of {', '.join(map(str, HEAD_SIZES))}; device=cpu computes any"
        )
    check_experts(options, config)
    path = gpu_path(
        model_dtype(options),
        device.torch_device,
        kv_cache_dtype=_KV_CACHE_DTYPES[options.kv_cache_dtype],
        batch_invariant=options.batch_invariant,
    )
    return replace(path, shard=shard_of(options, rank), experts=experts_of(options, rank))


def _weights_error(options: Options, device: Device, files: ModelFiles, rank: int) -> PermanentError:
    (config, made_for), dtype = config_of(files), model_dtype(options)
    path = _make_path(options, device, config, rank=rank)
    quantization = resolve_quantization(options.quantization, made_for, path)
    return weights_need_more(
        options,
        device.memory(),
        # A rank's part, or a little less: norms are whole everywhere.
        needed=weight_bytes(config, dtype, fp8=quantization == "fp8") // path.shard.size,
        as_fp8=weight_bytes(config, dtype, fp8=True) // path.shard.size,
    )
