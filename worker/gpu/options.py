"""What the options ask for that the device cannot do, or that means nothing on it."""

import logging

from configs.options import Options
from worker.errors import PermanentError

_log = logging.getLogger("octavo.worker")

_CPU_BLOCK_SIZES = (8, 16, 32)
_ONLY_ON_GPUS = {
    "gpu_memory_utilization": "kv_cache_memory bounds the KV cache there",
    "enforce_eager": "there are no CUDA graphs",
    "compilation_config": "there are no CUDA graphs",
}
_ONLY_ON_CPUS = {
    "kv_cache_memory": "the KV cache takes what gpu_memory_utilization leaves",
    "weight_cache": "weights are not packed there",
}


def check_cpu_options(options: Options) -> None:
    """Raises PermanentError for what only GPUs do, and warns of options that change nothing."""
    if options.quantization == "fp8":
        raise PermanentError("quantization=fp8 is computed on GPUs only: use int8, int4 or none on a CPU")
    if options.kv_cache_dtype in ("fp8", "fp8_e4m3"):
        raise PermanentError(f"kv_cache_dtype={options.kv_cache_dtype} is for GPUs only: use auto on a CPU")
    if options.kv_cache_dtype == "bfloat16" and options.dtype == "float32":
        raise PermanentError(
            "kv_cache_dtype=bfloat16 with dtype=float32 is for GPUs only: on a CPU use auto, or dtype=bfloat16"
        )
    if options.block_size not in _CPU_BLOCK_SIZES:
        raise PermanentError(
            f"block_size={options.block_size} is for GPUs only: use {', '.join(map(str, _CPU_BLOCK_SIZES[:-1]))} or "
            f"{_CPU_BLOCK_SIZES[-1]} on a CPU"
        )
    _warn(options, _ONLY_ON_GPUS, "on CPUs")


def check_gpu_options(options: Options) -> None:
    """Raises PermanentError for what only CPUs do, and warns of options that change nothing."""
    if options.quantization in ("int8", "int4"):
        raise PermanentError(
            f"quantization={options.quantization} is computed on CPUs only: use fp8 or none on a GPU, or device=cpu"
        )
    if options.num_redundant_experts:
        raise PermanentError(
            f"num_redundant_experts={options.num_redundant_experts}: experts are copied on CPUs only so far; use 0 on "
            "GPUs, or device=cpu"
        )
    if options.in_lockstep:
        raise PermanentError(
            f"enable_expert_parallel with data_parallel_size={options.data_parallel_size}: replicas share experts on "
            "CPUs only so far; use data_parallel_size=1, without enable_expert_parallel any, or device=cpu"
        )
    if options.pipeline_parallel_size > 1:
        raise PermanentError(
            f"pipeline_parallel_size={options.pipeline_parallel_size}: stages are for CPUs only so far; on GPUs use "
            f"tensor_parallel_size, or device=cpu"
        )
    _warn(options, _ONLY_ON_CPUS, "on GPUs")


def _warn(options: Options, without_effect: dict[str, str], where: str) -> None:
    for name, reason in without_effect.items():
        value = getattr(options, name)
        if value != type(options).model_fields[name].default:
            _log.warning("%s=%s changes nothing %s: %s", name, value, where, reason)
