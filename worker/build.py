"""From options to a runner that is ready for its first step."""

import logging
import time
from collections.abc import Callable, Sequence

import torch

from configs.options import Options
from protos import inference_pb2
from runtime.model_files import resolve_model
from runtime.version import octavo_version
from worker.capacity import resolve_max_model_len, resolve_num_blocks, resolve_num_swap_blocks
from worker.fingerprint import fingerprint
from worker.kv_cache import KVCache
from worker.rows import Rows
from worker.runner import Runner
from worker.weights import LoadedModel, load_model, open_weight_cache

_log = logging.getLogger("octavo.worker")


def build_runner(
    options: Options, progress: Callable[[float], None] = lambda fraction: None, cores: Sequence[int] = ()
) -> Runner:
    """Loads the model that the options name, makes its KV cache, and warms up.

    progress gets fractions of loading, from 0 to 1, on this thread. cores: that this thread and those of the kernels
    are bound to (worker.threads.prepare_threads). Raises ValueError (a model that is not there, weights that are
    damaged, a KV cache with no room) or PermanentError (options that do not fit the model); either would happen again.
    """
    start = time.monotonic()
    files = resolve_model(options.model)
    dtype = torch.float32 if options.dtype == "float32" else torch.bfloat16
    loaded = load_model(
        files,
        dtype=dtype,
        load_format=options.load_format,
        quantization=options.quantization,
        cache=open_weight_cache(options.weight_cache),
        progress=progress,
    )
    path = loaded.model.path
    _log.info(
        "weights are loaded, in %.2f s: %.2f GiB, quantization %s, computed by %s",
        time.monotonic() - start, loaded.model.weight_bytes / 2**30, loaded.quantization, path.name,
    )  # fmt: skip
    if path.native is not None:
        # The C++ kernels have threads of their own by now. torch's, which spin for milliseconds after each op they
        # share in, would take the cores from them.
        torch.set_num_threads(1)
        if cores:
            path.native.bind_threads(cores)
    kv_dtype = path.kv_cache_dtype
    num_blocks = resolve_num_blocks(options, loaded.config, kv_dtype)
    info = _model_info(options, loaded, options.served_model_name or files.name, dtype, num_blocks)
    rows = Rows(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=info.max_model_len,
        block_size=options.block_size,
        num_blocks=num_blocks,
        vocab_size=loaded.config.vocab_size,
        eos_token_ids=loaded.config.eos_token_ids,
    )
    # Block 0, the null block, comes on top of those that can be given out.
    kv_cache = KVCache(loaded.config, num_blocks=num_blocks + 1, block_size=options.block_size, path=path)
    num_swap_blocks = resolve_num_swap_blocks(options, loaded.config, kv_dtype)
    runner = Runner(loaded.model, kv_cache, rows, info, num_swap_blocks=num_swap_blocks)
    runner.warm_up()
    _log.info(
        "%s (%s, %s) ready in %.1f s: %d KV blocks of %d tokens (and %d for swap), max_model_len %d, fingerprint %s",
        info.name, info.architecture, info.dtype, time.monotonic() - start, num_blocks, info.block_size,
        num_swap_blocks, info.max_model_len, info.fingerprint,
    )  # fmt: skip
    return runner


def _model_info(
    options: Options, loaded: LoadedModel, name: str, dtype: torch.dtype, num_blocks: int
) -> inference_pb2.ModelInfo:
    config, dtype_name = loaded.config, str(dtype).removeprefix("torch.")
    said = {field: getattr(config.default_sampling, field) for field in config.default_sampling.__slots__}
    defaults = {field: value for field, value in said.items() if value is not None}
    if defaults:
        overrides = ", ".join(f"{field}={value:g}" for field, value in defaults.items())
        _log.info("the model's generation_config.json overrides the defaults of sampling: %s", overrides)
    return inference_pb2.ModelInfo(
        name=name,
        architecture=config.architecture,
        fingerprint=fingerprint(
            weights_digest=loaded.digest,
            dtype=dtype_name,
            quantization=loaded.quantization,
            kernels=loaded.model.path.name,
        ),
        max_model_len=resolve_max_model_len(options, config, num_blocks),
        vocab_size=config.vocab_size,
        eos_token_ids=sorted(config.eos_token_ids),
        dtype=dtype_name,
        quantization=loaded.quantization,
        default_sampling=inference_pb2.SamplingParams(**defaults),
        block_size=options.block_size,
        num_blocks=num_blocks,
        octavo_version=octavo_version(),
    )
