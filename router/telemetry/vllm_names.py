"""Which of the router's metrics vLLM has, and what they are called there."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry

from runtime.metric_names import VllmNames

NAMES = {
    "octavo_requests": ("vllm:request_success",),
    "octavo_time_to_first_token_seconds": ("vllm:time_to_first_token_seconds",),
    # The second was its name until 0.10.
    "octavo_inter_token_latency_seconds": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    "octavo_e2e_request_latency_seconds": ("vllm:e2e_request_latency_seconds",),
    "octavo_request_prompt_tokens": ("vllm:request_prompt_tokens",),
    "octavo_request_generation_tokens": ("vllm:request_generation_tokens",),
    "octavo_request_max_num_generation_tokens": ("vllm:request_max_num_generation_tokens",),
    "octavo_request_params_max_tokens": ("vllm:request_params_max_tokens",),
    "octavo_request_params_n": ("vllm:request_params_n",),
    "octavo_request_time_per_output_token_seconds": ("vllm:request_time_per_output_token_seconds",),
}

# Of vLLM's engine: it never hears of requests that are refused.
_FINISHED_REASONS = {
    "stop": "stop",
    "length": "length",
    "cancelled": "abort",
    "deadline_exceeded": "abort",
    "aborted": "abort",
    "error": "error",
    "internal": "error",
}


def vllm_names(own: CollectorRegistry, model_name: str) -> VllmNames:
    # A router's streams may have been on several replicas: vLLM's label for that says so.
    labels = {"model_name": model_name, "engine": "all"}
    return VllmNames(own, NAMES, lambda: labels, {"octavo_requests": _by_finished_reason})


def _by_finished_reason(labels: Mapping[str, str]) -> Mapping[str, str] | None:
    reason = _FINISHED_REASONS.get(labels["outcome"])
    return None if reason is None else {"finished_reason": reason}
