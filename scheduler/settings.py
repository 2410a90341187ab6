"""Combines the options and the workers' Ready messages into the core's settings."""

import logging

from configs.groups.speculation import SpeculativeConfig
from configs.options import Options
from protos import inference_pb2
from runtime.wire import MAX_FORCED_TOKENS
from scheduler.core.messages import CoreSettings, Speculation

log = logging.getLogger("octavo.scheduler")

# Default threshold of a long prefill, as a fraction of max_model_len, if several prefills share a step (vLLM's rule).
_LONG_PREFILL_FRACTION = 0.04
# The drafters of the core by method; other methods draft in the workers.
CORE_DRAFTERS = {"auto": ("suffix",), "ngram": ("ngram",), "suffix": ("suffix",)}


def core_settings(
    options: Options,
    model: inference_pb2.ModelInfo,
    num_swap_blocks: int = 0,
    *,
    holds_constrained: bool = False,
    drafter: str = "",
    encoder_cache_size: int = 0,
) -> CoreSettings:
    """Makes the core's settings. The other arguments are from the workers' Ready: block counts and encoder_cache_size
    are the minimum over the ranks, and one rank that holds constrained sequences is enough. drafter: the workers' own;
    empty: none.

    Logs a warning if the options rule out some prompts, or have no effect.
    """
    threshold = options.long_prefill_token_threshold
    if not threshold and options.max_num_partial_prefills > 1:
        threshold = max(1, int(model.max_model_len * _LONG_PREFILL_FRACTION))
    settings = CoreSettings(
        block_size=model.block_size,
        num_blocks=model.num_blocks,
        max_model_len=model.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        eos_token_ids=frozenset(model.eos_token_ids),
        enable_prefix_caching=options.enable_prefix_caching,
        scheduling_policy=options.scheduling_policy,
        priority_aging=options.priority_aging,
        enable_chunked_prefill=options.enable_chunked_prefill,
        long_prefill_token_threshold=threshold,
        max_num_partial_prefills=options.max_num_partial_prefills,
        max_long_partial_prefills=options.max_long_partial_prefills,
        inter_token_latency_target=options.inter_token_latency_target / 1e3,
        preemption_mode=options.preemption_mode,
        num_swap_blocks=num_swap_blocks,
        max_steps_in_flight=options.max_steps_in_flight,
        num_stages=options.pipeline_parallel_size,
        holds_constrained=holds_constrained,
        max_forced_tokens=0 if model.carries_states else MAX_FORCED_TOKENS,
        carries_states=model.carries_states,
        speculation=None if model.carries_states else _speculation(options.speculative_config, drafter),
        max_queued_requests=options.max_queued_requests,
        max_queued_tokens=options.max_queued_tokens,
        encoder_cache_size=encoder_cache_size,
        # An item that has more is encoded alone, so that the largest one needs no setting of its own.
        max_num_encoder_input_tokens=options.max_num_encoder_input_tokens or options.max_num_batched_tokens,
    )
    _warn(settings)
    if model.carries_states and options.speculative_config is not None:
        log.warning("speculative_config has no effect: the layers of %s carry a state, so it has no drafts", model.name)
    return settings


def _speculation(config: SpeculativeConfig | None, drafter: str) -> Speculation | None:
    """None: no sequence gets drafts but forced tokens."""
    if config is None:
        return None
    drafters = CORE_DRAFTERS.get(config.method, ())
    if not drafters and not drafter:
        log.warning(
            "speculative_config: the workers have no drafter for method=%s, so no sequence gets drafts: start them "
            "with the same speculative_config",
            config.method,
        )
        return None
    return Speculation(
        num_speculative_tokens=config.num_speculative_tokens,
        drafters=drafters,
        workers_draft=bool(drafter),
        # Its name begins with the method.
        workers_catch_up=drafter.startswith("draft_model"),
        prompt_lookup_min=config.prompt_lookup_min,
        prompt_lookup_max=config.prompt_lookup_max,
        max_cached_outputs=config.suffix_decoding_max_cached_requests,
    )


def _warn(settings: CoreSettings) -> None:
    budget, max_model_len = settings.max_num_batched_tokens, settings.max_model_len
    if not settings.enable_chunked_prefill and budget < max_model_len:
        log.warning(
            "enable_chunked_prefill is off and max_num_batched_tokens=%d is below max_model_len=%d: prompts of more "
            "than %d tokens are refused, because a prefill must fit into one step; raise max_num_batched_tokens to %d, "
            "or lower max_model_len",
            budget,
            max_model_len,
            budget,
            max_model_len,
        )
    if settings.preemption_mode == "swap" and not settings.num_swap_blocks:
        log.warning(
            "preemption_mode=swap, but the workers have no host blocks, so preempted sequences are computed again: "
            "give the workers the same preemption_mode and swap_space"
        )
