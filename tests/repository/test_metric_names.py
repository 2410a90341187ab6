"""Metrics under vLLM's names: a dashboard made for vLLM finds its metrics, with the same meaning."""

import re

from prometheus_client import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as as_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from router.telemetry.metrics import RouterMetrics
from tests.support.deploy.metric_families import router_registry, scheduler_registry, series, worker_registry
from tests.support.repository import ROOT

# Series that vLLM's own Grafana dashboard, its design page on metrics and autoscalers query.
ASKED_FOR = {
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:time_per_output_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:request_time_per_output_token_seconds_sum",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total",
    "vllm:request_success_total",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_max_num_generation_tokens_sum",
    "vllm:request_params_max_tokens_bucket",
    "vllm:request_params_n_bucket",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_inference_time_seconds_count",
    "vllm:iteration_tokens_total_bucket",
    "vllm:cache_config_info",
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
}


def test_each_name_is_shown_once_by_either_process():
    """A metric that both show would count twice: dashboards sum over processes."""
    router, scheduler = series(router_registry("vllm")), series(scheduler_registry("vllm"))
    assert router | scheduler >= ASKED_FOR
    assert not {name for name in router & scheduler if name.startswith("vllm:")}


def test_the_option_says_whose_names_are_shown():
    for registry in (router_registry, scheduler_registry):
        own, both, vllm = (series(registry(*names)) for names in (("octavo",), ("octavo", "vllm"), ("vllm",)))
        assert both == own | vllm
        assert not any(name.startswith("vllm:") for name in own)
        assert not any(name.startswith("octavo_") for name in vllm)
        assert "process_resident_memory_bytes" in own & vllm


def test_values_and_labels_are_vllms():
    metrics = RouterMetrics()
    # Cancelled requests and passed deadlines are aborts; refused requests never reach vLLM's engine.
    for outcome, count in (("stop", 5), ("cancelled", 2), ("deadline_exceeded", 1), ("resource_exhausted", 9)):
        metrics.requests.labels(outcome).inc(count)
    metrics.time_to_first_token.observe(0.2)
    shown = router_registry("octavo", "vllm", metrics=metrics)
    success = {
        labels["finished_reason"]: value
        for family in shown.collect()
        if family.name == "vllm:request_success"
        for _, labels, value, *_ in family.samples
    }
    assert success == {"stop": 5, "abort": 3}
    labels = {"model_name": "a-model", "engine": "all"}
    assert shown.get_sample_value("vllm:time_to_first_token_seconds_sum", labels) == 0.2
    assert shown.get_sample_value("octavo_time_to_first_token_seconds_sum") == 0.2

    of_replica = scheduler_registry("vllm", replica=1)
    assert of_replica.get_sample_value("vllm:num_preemptions_total", labels | {"engine": "1"}) == 3


def test_prometheus_can_read_both_forms():
    for registry in (router_registry("octavo", "vllm"), scheduler_registry("octavo", "vllm")):
        names = {family.name for family in text_string_to_metric_families(as_openmetrics(registry).decode())}
        assert any(name.startswith("vllm:") for name in names)
        text = generate_latest(registry).decode()
        samples = [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]
        assert len(samples) == len(set(samples)), "a series comes twice: Prometheus refuses the whole scrape"


def test_every_metric_has_its_line_in_operations_md():
    documented = set(re.findall(r"`(octavo_[a-z0-9_]+)", (ROOT / "docs/operations.md").read_text()))
    own = series(router_registry("octavo")) | series(scheduler_registry("octavo")) | series(worker_registry())
    known = {re.sub("_(bucket|sum|count)$", "", name) for name in own if name.startswith("octavo_")}
    assert len(known) > 50
    assert not known - documented
