"""Builds the runner that the options ask for, on a CPU or on a GPU."""

from collections.abc import Callable, Sequence

from configs.options import Options
from configs.quantization import offered
from worker.cpu.build import _log, build_cpu_runner
from worker.cpu.threaded_runner import ThreadedRunner
from worker.device.select import select_device
from worker.errors import PermanentError
from worker.layers.forward_context import ExpertLoad
from worker.step.runner import StepRunner

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
    """Raises PermanentError for options that need a GPU, and warns of options without effect on a CPU."""
    _check_quantization(options, on_gpu=False)
    if options.kv_cache_dtype != "auto" and options.dtype == "float32":
        raise PermanentError(
            f"kv_cache_dtype={options.kv_cache_dtype} with dtype=float32 is for GPUs only: on a CPU use auto, or "
            "dtype=bfloat16"
        )
    _warn(options, _ONLY_ON_GPUS, "on CPUs")


def check_gpu_options(options: Options) -> None:
    """Raises PermanentError for options that need a CPU, and warns of options without effect on a GPU."""
    _check_quantization(options, on_gpu=True)
    if options.num_redundant_experts:
        raise PermanentError(
            f"num_redundant_experts={options.num_redundant_experts}: copies of experts are for CPUs only so far; use 0 "
            "on GPUs, or device=cpu"
        )
    if options.in_lockstep:
        raise PermanentError(
            f"enable_expert_parallel with data_parallel_size={options.data_parallel_size}: replicas share experts on "
            "CPUs only so far; use data_parallel_size=1, or no enable_expert_parallel, or device=cpu"
        )
    if options.pipeline_parallel_size > 1:
        raise PermanentError(
            f"pipeline_parallel_size={options.pipeline_parallel_size}: stages are for CPUs only so far; on GPUs use "
            f"tensor_parallel_size, or device=cpu"
        )
    _warn(options, _ONLY_ON_CPUS, "on GPUs")


def _check_quantization(options: Options, *, on_gpu: bool) -> None:
    none, *kinds = offered(on_gpu=on_gpu)
    if options.quantization not in ("auto", none, *kinds):
        other, here = ("CPUs", "a GPU, or device=cpu") if on_gpu else ("GPUs", "a CPU")
        raise PermanentError(
            f"quantization={options.quantization} is for {other} only: use {', '.join(kinds)} or none on {here}"
        )


def _warn(options: Options, without_effect: dict[str, str], where: str) -> None:
    for name, reason in without_effect.items():
        value = getattr(options, name)
        if value != type(options).model_fields[name].default:
            _log.warning("%s=%s has no effect %s: %s", name, value, where, reason)


def build_runner(
    options: Options,
    progress: Callable[[float], None] = lambda fraction: None,
    cores: Sequence[int] = (),
    *,
    replica: int = 0,
    rank: int = 0,
    watch_experts: Callable[[ExpertLoad], None] = lambda load: None,
) -> StepRunner:
    """Loads the options' model on their device, makes its KV cache, and warms up.

    progress: called on this thread with the fraction of loading, from 0 to 1. cores: the cores that this thread and
    those of the kernels are bound to (worker.cpu.threads.prepare_threads). watch_experts: called once if the model has
    experts, on CPUs only; of ranks that count the same tokens, only the first calls it. Raises ValueError (missing
    model, damaged weights, no room for a KV cache) or PermanentError (options that do not fit the model or the device);
    neither goes away by a restart.
    """
    device = select_device(options, replica, rank)
    if device is None:
        check_cpu_options(options)
        runner = build_cpu_runner(options, progress, cores, replica=replica, rank=rank, watch_experts=watch_experts)
        if options.pipeline_parallel_size == 1:
            return runner
        return ThreadedRunner(runner, max_steps_in_flight=options.max_steps_in_flight)
    check_gpu_options(options)
    # Imported here: workers on CPUs do without Triton and its kernels.
    from worker.gpu.build import build_gpu_runner

    return build_gpu_runner(options, device, progress, replica=replica, rank=rank)
