"""The information that a worker reports about its model (name, fingerprint, limits), and the Rows made from it."""

import hashlib
import logging
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import torch

from configs.options import Options
from configs.sampling import BY_NAME
from kernels.shard import ALL_LAYERS, WHOLE, Shard, Stage
from protos import inference_pb2
from runtime.media.recipes.registry import recipe_to_json
from runtime.wire import octavo_version
from worker.errors import PermanentError
from worker.layers.kv_cache import DrafterBlocks, KVCache, automatic_block_size, block_sizes_of
from worker.model_config import ModelConfig, SamplingDefaults
from worker.models.loader import LoadedModel, WantedItems
from worker.sampling.grammars import Grammars
from worker.step.items import ItemTokens
from worker.step.rows import Rows

_log = logging.getLogger("octavo.worker")


def cpu_kernels(path: str) -> str:
    """Identifies the kernels in use, as far as their results may differ: the name of the compute path, the vector
    width, and the number of threads that a sum may be split over."""
    return f"{path}-{torch.backends.cpu.get_cpu_capability()}-{torch.get_num_threads()}"


def gpu_kernels(path: str, gpu: str) -> str:
    """Identifies a GPU's kernels: by the GPU's name, because tiles depend on its number of SMs; by Triton's version,
    because Triton compiles the kernels; and by CUDA's, because CUDA's libraries multiply matrices."""
    return f"{path}-{gpu}-triton-{version('triton')}-cuda-{torch.version.cuda}"


def fingerprint(
    *,
    weights_digest: str,
    dtype: str,
    quantization: str,
    kernels: str,
    tensor_size: int = 1,
    whole_experts: bool = False,
    rope: str = "",
    library: str = "",
) -> str:
    """Returns 16 hexadecimal digits over weights, dtype, quantization, kernels, parallel sizes and versions.

    kernels: from `cpu_kernels` or `gpu_kernels`; they determine the KV cache's dtype, too. whole_experts: True if the
    ranks of a tensor group have whole experts instead of a part of each, which changes the bits of sums. Which rank has
    which experts, and how many replicas share them, changes no bit on CPUs, and on GPUs no more than the tensor group's
    size does. rope: RopeConfig.variant. library: the version of transformers, if its modules compute the model.
    """
    parts = [
        ("weights", weights_digest),
        ("dtype", dtype),
        ("quantization", quantization),
        ("kernels", kernels),
        ("tensor", str(tensor_size)),
        ("octavo", octavo_version()),
        ("torch", torch.__version__),
    ]
    if whole_experts:
        parts.append(("experts", "whole"))
    if rope:
        parts.append(("rope", rope))
    if library:
        parts.append(("transformers", library))
    return hashlib.sha256("\n".join(f"{name}={value}" for name, value in parts).encode()).hexdigest()[:16]


def model_dtype(options: Options) -> torch.dtype:
    """Returns the dtype of weights and activations."""
    return torch.float32 if options.dtype == "float32" else torch.bfloat16


def model_info(
    options: Options,
    loaded: LoadedModel,
    *,
    name: str,
    kernels: str,
    num_blocks: int,
    max_model_len: int,
    grammars: Grammars | None = None,
) -> inference_pb2.ModelInfo:
    """Makes the ModelInfo that Ready sends to the scheduler. name: of the model's files. kernels: from cpu_kernels or
    gpu_kernels. num_blocks: without the null block. grammars: None if the replica can honour no constraint."""
    config, dtype_name = loaded.config, str(model_dtype(options)).removeprefix("torch.")
    return inference_pb2.ModelInfo(
        name=options.served_model_name or name,
        architecture=config.architecture,
        fingerprint=fingerprint(
            weights_digest=loaded.digest,
            dtype=dtype_name,
            quantization=loaded.quantization,
            kernels=kernels,
            tensor_size=options.tensor_parallel_size,
            whole_experts=options.enable_expert_parallel and options.tensor_parallel_size > 1,
            rope=config.rope.variant,
            library="" if config.library is None else config.library.version,
        ),
        max_model_len=max_model_len,
        vocab_size=config.vocab_size,
        eos_token_ids=sorted(config.eos_token_ids),
        dtype=dtype_name,
        quantization=loaded.quantization,
        default_sampling=default_sampling(options, config.default_sampling),
        block_size=options.block_size,
        num_blocks=num_blocks,
        octavo_version=octavo_version(),
        grammar_engine="" if grammars is None else grammars.version,
        carries_states=config.recurrence is not None,
        media_json="" if loaded.recipe is None else recipe_to_json(loaded.recipe),
    )


def default_sampling(options: Options, of_model: SamplingDefaults) -> inference_pb2.SamplingParams:
    """Returns the parameters that requests may leave open: those of the options, else those of the model's files."""
    said: dict[str, Any] = asdict(of_model) if options.generation_config == "auto" else {}
    said |= {name: BY_NAME[name].kind(value) for name, value in options.override_generation_config.items()}
    defaults = {name: value for name, value in said.items() if value is not None}
    if defaults:
        _log.info("defaults of sampling: %s", ", ".join(f"{name}={value:g}" for name, value in defaults.items()))
    return inference_pb2.SamplingParams(**defaults)


def make_rows(
    options: Options, loaded: LoadedModel, info: inference_pb2.ModelInfo, grammars: Grammars | None = None
) -> Rows:
    """grammars: None also for ranks that do not sample."""
    return Rows(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=info.max_model_len,
        block_size=options.block_size,
        num_blocks=info.num_blocks,
        vocab_size=loaded.config.vocab_size,
        eos_token_ids=loaded.config.eos_token_ids,
        grammars=grammars,
        item_tokens=item_tokens(loaded),
    )


def item_tokens(loaded: LoadedModel) -> ItemTokens | None:
    """Returns how rows have images and videos; None: the model takes none."""
    if loaded.recipe is None:
        return None
    config = loaded.config
    return ItemTokens(embedded=config.embedded_token_ids, has_axes=config.mrope_section is not None)


def wanted_items(options: Options) -> WantedItems:
    """Returns the images and videos that the options ask for."""
    return WantedItems(
        limits=options.limit_mm_per_prompt, processor=options.mm_processor_kwargs, tokenizer=options.tokenizer
    )


def log_ready(info: inference_pb2.ModelInfo, *, seconds: float, num_swap_blocks: int) -> None:
    """Logs that the worker is ready. seconds: how long the start took."""
    _log.info(
        "%s (%s, %s) ready in %.1f s: %d KV blocks of %d tokens (and %d for swap), max_model_len %d, fingerprint %s",
        info.name,
        info.architecture,
        info.dtype,
        seconds,
        info.num_blocks,
        info.block_size,
        num_swap_blocks,
        info.max_model_len,
        info.fingerprint,
    )


def check_states(options: Options, config: ModelConfig) -> None:
    """Raises PermanentError, naming the option, if the options ask for what a model whose layers carry a state from
    token to token cannot do."""
    if config.recurrence is None:
        return
    if options.speculative_config is not None:
        raise PermanentError(
            f"speculative_config: {config.architecture} has layers that carry a state from token to token, which "
            "cannot go back over a rejected draft: leave speculative_config out"
        )


def refuse_states_on_gpus(options: Options, config: ModelConfig) -> None:
    """Raises PermanentError for a model whose layers carry a state."""
    if config.recurrence is not None:
        raise PermanentError(
            f"device={options.device}: {config.architecture} has layers that carry a state from token to token, which "
            "are computed on CPUs only so far: use device=cpu"
        )


def with_block_size(options: Options, config: ModelConfig, dtype: torch.dtype, *, on_gpu: bool = False) -> Options:
    """Returns the options with the block size that the model gets: the given one, or one that fits its states. dtype:
    of keys and values. Raises PermanentError for a size that does not work."""
    sizes = block_sizes_of(config, on_gpu=on_gpu)
    if "block_size" not in options.model_fields_set:
        if config.recurrence is None:
            return options
        return options.model_copy(update={"block_size": automatic_block_size(config, dtype, options.block_size)})
    if options.block_size not in sizes:
        where = "models with layers that carry a state" if on_gpu or options.block_size > 128 else "GPUs"
        raise PermanentError(
            f"block_size={options.block_size} is for {where} only: use {', '.join(map(str, sizes[:-1]))} or "
            f"{sizes[-1]} on a {'GPU' if on_gpu else 'CPU'}"
        )
    return options


def resolve_num_blocks(
    options: Options,
    config: ModelConfig,
    dtype: torch.dtype,
    shard: Shard = WHOLE,
    stage: Stage = ALL_LAYERS,
    drafter: DrafterBlocks | None = None,
    taken_bytes: int = 0,
) -> int:
    """Returns how many blocks a rank can allocate, from num_blocks_override or kv_cache_memory, without the null block.
    taken_bytes: of kv_cache_memory, for something else.

    Raises ValueError, naming the option, if there is room for none.
    """
    if options.num_blocks_override:
        return options.num_blocks_override
    num_blocks = KVCache.num_blocks_for(
        config,
        num_bytes=int(options.kv_cache_memory * 2**30) - taken_bytes,
        block_size=options.block_size,
        dtype=dtype,
        shard=shard,
        stage=stage,
        drafter=drafter,
    )
    return num_blocks - 1


def resolve_num_swap_blocks(
    options: Options,
    config: ModelConfig,
    dtype: torch.dtype,
    shard: Shard = WHOLE,
    stage: Stage = ALL_LAYERS,
    more_bytes: int = 0,
) -> int:
    """Returns the number of host blocks for swapped KV: as many as swap_space holds, or 0 unless preemption_mode=swap.
    more_bytes: what is swapped with each block beside the model's KV.

    Raises PermanentError, naming the option, if there is room for none.
    """
    if options.preemption_mode != "swap":
        return 0
    size = KVCache.block_bytes(config, options.block_size, dtype, shard, stage) + more_bytes
    num_blocks = int(options.swap_space * 2**30) // size
    if not num_blocks:
        raise PermanentError(
            f"swap_space={options.swap_space:g} GiB holds no KV block of {size / 2**20:.3g} MiB: give at least "
            f"{size / 2**30:.4g}, or preemption_mode=recompute"
        )
    return num_blocks


def longest_sequence(options: Options, config: ModelConfig) -> int:
    """Returns max_model_len if it is set, else the model's context length. Raises PermanentError if it is larger."""
    longest = config.longest_context
    if options.max_model_len > longest:
        raise PermanentError(
            f"max_model_len={options.max_model_len} is beyond the model's context length: use {longest} or less"
        )
    return options.max_model_len or config.max_position_embeddings


def resolve_max_model_len(
    options: Options, config: ModelConfig, num_blocks: int, *, most_tokens: int | None = None, on_gpu: bool = False
) -> int:
    """Returns max_model_len if it is set, else the model's context length, limited to what the KV cache holds (the
    limit is logged).

    most_tokens: a lower limit of the memory beside the cache. on_gpu: gpu_memory_utilization sets the cache's size, not
    kv_cache_memory. Raises PermanentError, naming the option, if max_model_len is more than the model or the cache
    holds.
    """
    longest, held = longest_sequence(options, config), num_blocks * options.block_size
    held = held if most_tokens is None else min(held, most_tokens)
    if held >= longest:
        return longest
    cache_option = _cache_option(options, on_gpu=on_gpu)
    if most_tokens is not None:
        cache_option += ", or lower limit_mm_per_prompt,"
    if options.max_model_len:
        raise PermanentError(
            f"max_model_len={options.max_model_len} does not fit into {num_blocks} KV blocks of {options.block_size} "
            f"tokens: use {held} or less, or raise {cache_option}"
        )
    _log.warning(
        "max_model_len is %d, not the model's %d: the KV cache has %d blocks of %d tokens; raise %s for more",
        held,
        longest,
        num_blocks,
        options.block_size,
        cache_option,
    )
    return held


def _cache_option(options: Options, *, on_gpu: bool) -> str:
    if options.num_blocks_override:
        return f"num_blocks_override={options.num_blocks_override}"
    if on_gpu:
        return f"gpu_memory_utilization={options.gpu_memory_utilization:g}"
    return f"kv_cache_memory={options.kv_cache_memory:g}"
