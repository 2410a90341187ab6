"""A scheduler's status and its Prometheus metrics, under our names and vLLM's.

A scrape reads counts from the status; only histograms are kept here.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from configs.options import Options
from runtime.telemetry.lag import lag_histogram
from runtime.telemetry.metrics import VllmNames, exposed
from scheduler.core.messages import CoreLoad, CoreStats, Moment, PreemptionReason, Timeline

_NO_LOAD = CoreLoad(num_running=0, num_waiting=0, num_free_blocks=0, num_blocks=0, num_queued_tokens=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStatus:
    """A snapshot, published by the step loop and read by metrics, /health and logs on other threads."""

    load: CoreLoad = _NO_LOAD
    stats: CoreStats = field(default_factory=CoreStats)
    # Empty before the first epoch.
    model_name: str = ""
    # The workers' size; 0 before the first epoch.
    block_size: int = 0
    # Host blocks for swapped KV.
    num_swap_blocks: int = 0
    # Cumulative count of sequences that were running when an epoch ended; they wait and are computed again.
    num_lost_with_workers: int = 0
    epoch: int = 0
    workers_ready: bool = False
    draining: bool = False
    # The state of the workers, in a few words.
    workers: str = "starting"
    # Bytes of the files of items that are here, and of those that live groups need or that are still coming in.
    num_item_bytes: int = 0
    num_needed_item_bytes: int = 0
    # Number of waves: runs of steps that all replicas computed together.
    num_waves: int = 0

    @property
    def kv_cache_usage(self) -> float:
        """The share of blocks in use, 0 to 1."""
        load = self.load
        return 1.0 - load.num_free_blocks / load.num_blocks if load.num_blocks else 0.0

    @property
    def swap_space_usage(self) -> float:
        """The share of host blocks that hold swapped KV, 0 to 1."""
        return 1.0 - self.load.num_free_swap_blocks / self.num_swap_blocks if self.num_swap_blocks else 0.0

    @property
    def health(self) -> tuple[bool, str]:
        """True if requests are served now, and one line that describes the state."""
        if self.draining:
            return False, f"draining: {self.load.num_running} running, {self.load.num_waiting} waiting"
        if not self.workers_ready:
            return False, self.workers
        return True, f"{self.workers}: {self.load.num_running} running, {self.load.num_waiting} waiting"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTimes:
    """The times of a group, on the clock of its timeline; None: the group never got that far.

    With several choices, the first one to reach a moment counts, but the last one to finish. Time spent preempted
    counts towards the phase that it interrupted.
    """

    queued: float
    admitted: float | None
    first_token: float | None
    finished: float

    @classmethod
    def of(cls, timeline: Timeline) -> "GroupTimes":
        """The times of a finished timeline."""
        first: dict[Moment, float] = {}
        for entry in timeline.entries:
            first.setdefault(entry.moment, entry.time)
        return cls(
            queued=timeline.entries[0].time,
            admitted=first.get(Moment.ADMITTED),
            first_token=first.get(Moment.DECODING),
            finished=timeline.entries[-1].time,
        )

    @property
    def in_queue(self) -> float:
        """Seconds, like the others, from submission to the first row; to the end if the group never ran."""
        return (self.finished if self.admitted is None else self.admitted) - self.queued

    @property
    def in_prefill(self) -> float | None:
        """Seconds from its first row to its first token."""
        if self.admitted is None or self.first_token is None:
            return None
        return self.first_token - self.admitted

    @property
    def in_decode(self) -> float | None:
        """Seconds from its first token to its end."""
        return None if self.first_token is None else self.finished - self.first_token

    @property
    def in_inference(self) -> float | None:
        """Seconds from its first row to its end."""
        return None if self.admitted is None else self.finished - self.admitted


NAMES = {
    "octavo_num_requests_running": ("vllm:num_requests_running",),
    "octavo_num_requests_waiting": ("vllm:num_requests_waiting",),
    # The second is vLLM's name until 0.9.
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
    "octavo_speculations": ("vllm:spec_decode_num_drafts",),
    "octavo_speculated_tokens": ("vllm:spec_decode_num_draft_tokens",),
    "octavo_accepted_speculated_tokens": ("vllm:spec_decode_num_accepted_tokens",),
    "octavo_accepted_by_position": ("vllm:spec_decode_num_accepted_tokens_per_pos",),
}

_CACHE_LABELS = {"num_blocks": "num_gpu_blocks", "num_swap_blocks": "num_cpu_blocks"}


def vllm_names(own: CollectorRegistry, model_name: Callable[[], str], replica: int) -> VllmNames:
    return VllmNames(
        own,
        NAMES,
        lambda: {"model_name": model_name(), "engine": str(replica)},
        {"octavo_cache_config_info": _vllm_cache_config},
    )


def _vllm_cache_config(labels: Mapping[str, str]) -> Mapping[str, str]:
    return {_CACHE_LABELS.get(name, name): value for name, value in labels.items()}


_STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0)
_REQUEST_BUCKETS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 600.0)
_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_SCHEDULE_BUCKETS = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 0.1)


class SchedulerMetrics:
    """The metrics of one scheduler, in a registry of their own."""

    def __init__(self, status: Callable[[], SchedulerStatus], options: Options, replica: int) -> None:
        """status: called for each scrape, on the scraping thread."""
        self.registry = CollectorRegistry()
        self.registry.register(_StatusCollector(status, options))
        # The registry that /metrics serves.
        self.shown = exposed(
            options.metrics_names,
            self.registry,
            vllm_names(self.registry, lambda: status().model_name, replica),
        )
        self.step_duration = Histogram(
            "octavo_step_duration_seconds",
            "Time from sending a plan, or from the previous result if that is later, to its result.",
            buckets=_STEP_BUCKETS,
            registry=self.registry,
        )
        self.schedule_duration = Histogram(
            "octavo_schedule_duration_seconds",
            "Time to make a plan and send it.",
            buckets=_SCHEDULE_BUCKETS,
            registry=self.registry,
        )
        self.step_tokens = Histogram(
            "octavo_step_tokens", "Tokens that a step computes.", buckets=_TOKEN_BUCKETS, registry=self.registry
        )
        self._request_queue_time = _of_requests("queue", "from submission to the first row", self.registry)
        self._request_prefill_time = _of_requests("prefill", "from the first row to the first token", self.registry)
        self._request_decode_time = _of_requests("decode", "from the first token to the last", self.registry)
        self._request_inference_time = _of_requests("inference", "from the first row to the last token", self.registry)
        self.lag = lag_histogram(self.registry)
        self.invalid_messages = Counter(
            "octavo_invalid_messages",
            "ZeroMQ messages ignored: not decodable, or from an unknown peer.",
            registry=self.registry,
        )

    def observe_ended(self, times: GroupTimes) -> None:
        """Observes the times of a group that has ended."""
        self._request_queue_time.observe(times.in_queue)
        for histogram, seconds in (
            (self._request_prefill_time, times.in_prefill),
            (self._request_decode_time, times.in_decode),
            (self._request_inference_time, times.in_inference),
        ):
            if seconds is not None:
                histogram.observe(seconds)


def _of_requests(phase: str, help: str, registry: CollectorRegistry) -> Histogram:
    name = f"octavo_request_{phase}_time_seconds"
    return Histogram(name, f"Ended requests: time {help}.", buckets=_REQUEST_BUCKETS, registry=registry)


class _StatusCollector(Collector):
    def __init__(self, status: Callable[[], SchedulerStatus], options: Options) -> None:
        self._status, self._options = status, options

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        load, stats = status.load, status.stats
        gauges = {
            "octavo_num_requests_running": ("Sequences that hold a row.", load.num_running),
            "octavo_num_requests_waiting": ("Sequences that wait for a row.", load.num_waiting),
            "octavo_kv_cache_usage_ratio": ("KV blocks in use, 0 to 1.", status.kv_cache_usage),
            "octavo_swap_space_usage_ratio": ("Host blocks that hold swapped KV, 0 to 1.", status.swap_space_usage),
            "octavo_stored_item_bytes": (
                "Bytes of images and videos here; item_memory bounds them.",
                status.num_item_bytes,
            ),
            "octavo_needed_item_bytes": ("Those that live requests need.", status.num_needed_item_bytes),
            "octavo_worker_epoch": ("Grows each time the workers start; 0 before the first time.", status.epoch),
        }
        counters = {
            "octavo_num_preemptions": ("Preemptions for lack of KV blocks.", stats.num_preemptions),
            "octavo_num_swaps": ("Preemptions that swapped KV to host memory.", stats.num_swaps),
            "octavo_swapped_out_blocks": ("KV blocks copied to host memory.", stats.num_blocks_swapped_out),
            "octavo_swapped_in_blocks": ("KV blocks copied back from host memory.", stats.num_blocks_swapped_in),
            "octavo_prompt_tokens": ("Prompt tokens of requests that began to run.", stats.num_prompt_tokens),
            "octavo_generation_tokens": ("Output tokens.", stats.num_output_tokens),
            "octavo_prefix_cache_queries": ("Tokens looked up in the prefix cache.", stats.num_prefix_queries),
            "octavo_prefix_cache_hits": ("Tokens found in the prefix cache.", stats.num_prefix_hits),
            "octavo_item_queries": ("Images and videos that prefills needed.", stats.num_item_queries),
            "octavo_item_hits": ("Those whose embeddings were in the cache.", stats.num_item_hits),
            "octavo_encoded_embeddings": ("Embeddings of items encoded.", stats.num_encoded_embeddings),
            "octavo_draft_tokens": ("Draft tokens planned, forced ones included.", stats.num_draft_tokens),
            "octavo_accepted_draft_tokens": ("Draft tokens that the model confirmed.", stats.num_accepted_tokens),
            "octavo_speculations": ("Times that a sequence had drafts in a step.", stats.num_drafts),
            "octavo_speculated_tokens": ("Their drafts.", stats.num_speculated_tokens),
            "octavo_accepted_speculated_tokens": ("Accepted ones of them.", sum(stats.num_accepted_by_position)),
            "octavo_limited_steps": ("Steps whose prefills had a limit of time.", stats.num_limited_steps),
            "octavo_late_steps": ("Those that took longer than they should.", stats.num_late_steps),
            "octavo_limited_step_predicted_seconds": ("Time that they should take.", stats.predicted_seconds),
            "octavo_limited_step_seconds": ("Time that they took.", stats.measured_seconds),
            "octavo_lockstep_empty_steps": ("Empty steps, run while another replica has work.", stats.num_empty_steps),
            "octavo_lockstep_waves": ("Waves: runs of steps that replicas computed together.", status.num_waves),
        }
        for name, (help, value) in gauges.items():
            yield GaugeMetricFamily(name, help, value=value)
        for name, (help, value) in counters.items():
            yield CounterMetricFamily(name, help, value=value)
        yield _accepted_by_position(stats.num_accepted_by_position)
        yield _preemptions_by_reason(status)
        yield _cache_config(status, self._options)


def _cache_config(status: SchedulerStatus, options: Options) -> Metric:
    labels = {
        "block_size": status.block_size or options.block_size,
        "cache_dtype": options.kv_cache_dtype,
        "enable_prefix_caching": options.enable_prefix_caching,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "num_blocks": status.load.num_blocks,
        "num_swap_blocks": status.num_swap_blocks,
    }
    family = GaugeMetricFamily(
        "octavo_cache_config_info", "Always 1: its labels describe the KV cache.", labels=list(labels)
    )
    family.add_metric([str(value) for value in labels.values()], 1)
    return family


def _accepted_by_position(counts: tuple[int, ...]) -> Metric:
    family = CounterMetricFamily(
        "octavo_accepted_by_position",
        "Accepted speculated tokens by their place among the drafts of a step, from 0.",
        labels=["position"],
    )
    for position, count in enumerate(counts):
        family.add_metric([str(position)], count)
    return family


def _preemptions_by_reason(status: SchedulerStatus) -> Metric:
    family = CounterMetricFamily(
        "octavo_preemptions_by_reason", "Sequences that lost their KV blocks and wait to come back.", labels=["reason"]
    )
    family.add_metric([PreemptionReason.NO_BLOCKS.value], status.stats.num_preemptions)
    family.add_metric([PreemptionReason.WORKERS_LOST.value], status.num_lost_with_workers)
    return family
