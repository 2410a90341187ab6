"""The core's settings, from what the options say and what the workers bring."""

from configs.options import Options
from protos import inference_pb2
from scheduler.messages import CoreSettings


def core_settings(options: Options, model: inference_pb2.ModelInfo) -> CoreSettings:
    """model: as the workers' Ready says it, num_blocks being the least over the ranks."""
    return CoreSettings(
        block_size=model.block_size,
        num_blocks=model.num_blocks,
        max_model_len=model.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        eos_token_ids=frozenset(model.eos_token_ids),
        enable_prefix_caching=options.enable_prefix_caching,
        scheduling_policy=options.scheduling_policy,
        max_queued_requests=options.max_queued_requests,
        max_queued_tokens=options.max_queued_tokens,
    )
