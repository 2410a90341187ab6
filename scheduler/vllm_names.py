"""Which of a scheduler's metrics vLLM has, and what they are called there."""

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry

from runtime.metric_names import VllmNames

NAMES = {
    "octavo_num_requests_running": ("vllm:num_requests_running",),
    "octavo_num_requests_waiting": ("vllm:num_requests_waiting",),
    # The second was its name until 0.9.
    "octavo_kv_cache_usage_ratio": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "octavo_num_preemptions": ("vllm:num_preemptions",),
    "octavo_prompt_tokens": ("vllm:prompt_tokens",),
    "octavo_generation_tokens": ("vllm:generation_tokens",),
    "octavo_prefix_cache_queries": ("vllm:prefix_cache_queries",),
    "octavo_prefix_cache_hits": ("vllm:prefix_cache_hits",),
    "octavo_step_tokens": ("vllm:iteration_tokens_total",),
    "octavo_request_queue_time_seconds": ("vllm:request_queue_time_seconds",),
    "octavo_request_prefill_time_seconds": ("vllm:request_prefill_time_seconds",),
    "octavo_request_decode_time_seconds": ("vllm:request_decode_time_seconds",),
    "octavo_request_inference_time_seconds": ("vllm:request_inference_time_seconds",),
    "octavo_cache_config_info": ("vllm:cache_config_info",),
    "octavo_draft_tokens": ("vllm:spec_decode_num_draft_tokens",),
    "octavo_accepted_draft_tokens": ("vllm:spec_decode_num_accepted_tokens",),
}

_CACHE_LABELS = {"num_blocks": "num_gpu_blocks", "num_swap_blocks": "num_cpu_blocks"}


def vllm_names(own: CollectorRegistry, model_name: Callable[[], str], replica: int) -> VllmNames:
    return VllmNames(
        own,
        NAMES,
        lambda: {"model_name": model_name(), "engine": str(replica)},
        {"octavo_cache_config_info": _cache_config},
    )


def _cache_config(labels: Mapping[str, str]) -> Mapping[str, str]:
    return {_CACHE_LABELS.get(name, name): value for name, value in labels.items()}
