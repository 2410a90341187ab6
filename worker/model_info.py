"""What a worker tells of its model, and the rows that it keeps for it, whatever it computes on."""

import logging

import torch

from configs.options import Options
from protos import inference_pb2
from runtime.version import octavo_version
from worker.fingerprint import fingerprint
from worker.rows import Rows
from worker.weights import LoadedModel

_log = logging.getLogger("octavo.worker")


def model_dtype(options: Options) -> torch.dtype:
    """Of weights and activations."""
    return torch.float32 if options.dtype == "float32" else torch.bfloat16


def model_info(
    options: Options, loaded: LoadedModel, *, name: str, kernels: str, num_blocks: int, max_model_len: int
) -> inference_pb2.ModelInfo:
    """As Ready tells it to the scheduler. name: of the model's files. kernels: of worker.fingerprint. num_blocks: that
    can be given out."""
    config, dtype_name = loaded.config, str(model_dtype(options)).removeprefix("torch.")
    said = {field: getattr(config.default_sampling, field) for field in config.default_sampling.__slots__}
    defaults = {field: value for field, value in said.items() if value is not None}
    if defaults:
        overrides = ", ".join(f"{field}={value:g}" for field, value in defaults.items())
        _log.info("the model's generation_config.json overrides the defaults of sampling: %s", overrides)
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
        ),
        max_model_len=max_model_len,
        vocab_size=config.vocab_size,
        eos_token_ids=sorted(config.eos_token_ids),
        dtype=dtype_name,
        quantization=loaded.quantization,
        default_sampling=inference_pb2.SamplingParams(**defaults),
        block_size=options.block_size,
        num_blocks=num_blocks,
        octavo_version=octavo_version(),
    )


def make_rows(options: Options, loaded: LoadedModel, info: inference_pb2.ModelInfo) -> Rows:
    return Rows(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=info.max_model_len,
        block_size=options.block_size,
        num_blocks=info.num_blocks,
        vocab_size=loaded.config.vocab_size,
        eos_token_ids=loaded.config.eos_token_ids,
    )


def log_ready(info: inference_pb2.ModelInfo, *, seconds: float, num_swap_blocks: int) -> None:
    """seconds: that the start took."""
    _log.info(
        "%s (%s, %s) ready in %.1f s: %d KV blocks of %d tokens (and %d for swap), max_model_len %d, fingerprint %s",
        info.name, info.architecture, info.dtype, seconds, info.num_blocks, info.block_size, num_swap_blocks,
        info.max_model_len, info.fingerprint,
    )  # fmt: skip
