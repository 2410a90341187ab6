"""The router's Prometheus metrics, in a registry of their own, and vLLM's names for them."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from router.accepted import EndedRequest
from router.telemetry.event_log import EventLog
from runtime.telemetry.lag import lag_histogram
from runtime.telemetry.metrics import VllmNames


class QuickCounter(Collector):
    def __init__(self, name: str, documentation: str, registry: CollectorRegistry) -> None:
        self._name, self._documentation = name, documentation
        self._value = 0
        registry.register(self)

    def inc(self, amount: int) -> None:
        self._value += amount

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(self._name, self._documentation, value=self._value)


class FollowedCounter(Collector):
    """Counts of replicas, read from the replicas at each scrape."""

    def __init__(self, name: str, documentation: str, registry: CollectorRegistry) -> None:
        self._name, self._documentation = name, documentation
        self._read: dict[str, Callable[[], int]] = {}
        registry.register(self)

    def follow(self, replica: str, read: Callable[[], int]) -> None:
        self._read[replica] = read

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._documentation, labels=["replica"])
        for replica, read in list(self._read.items()):
            family.add_metric([replica], read())
        yield family


class QuickHistogram(Collector):
    def __init__(self, name: str, documentation: str, buckets: Sequence[float], registry: CollectorRegistry) -> None:
        """buckets: upper bounds, ascending; infinity is added."""
        self._name, self._documentation = name, documentation
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        buckets: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*self._bounds, float("inf")), tuple(self._counts), strict=True):
            total += count
            buckets.append((floatToGoString(bound), total))
        yield HistogramMetricFamily(self._name, self._documentation, buckets=buckets, sum_value=self._sum)


_TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_BUCKETS = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 5.0)
_COMPILE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_COUNT_BUCKETS = tuple(mantissa * 10**exponent for exponent in range(6) for mantissa in (1, 2, 5))
_REQUEST_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 600.0)


class RouterMetrics:
    """Times are in seconds; tokens are counted as they are handed to clients."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        # What no count tells: the latest events.
        self.events = EventLog()
        self.requests = Counter(
            "octavo_requests_total",
            "Requests that ended, by the finish of their first choice (`stop`, `length`...), else by gRPC status.",
            ["outcome"],
            registry=self.registry,
        )
        self.ignored_fields = Counter(
            "octavo_http_ignored_fields_total",
            "Fields of HTTP requests that were ignored because they are not known, by name; `other`: any other name.",
            ["field"],
            registry=self.registry,
        )
        self.time_to_first_token = Histogram(
            "octavo_time_to_first_token_seconds",
            "From the request's arrival to its first output token.",
            buckets=_TTFT_BUCKETS,
            registry=self.registry,
        )
        self.inter_token_latency = QuickHistogram(
            "octavo_inter_token_latency_seconds",
            "Between two arrivals of output tokens of one choice.",
            buckets=_TOKEN_BUCKETS,
            registry=self.registry,
        )
        self.request_latency = Histogram(
            "octavo_e2e_request_latency_seconds",
            "From the request's arrival to its end.",
            buckets=_REQUEST_BUCKETS,
            registry=self.registry,
        )
        self.prompt_tokens = Counter("octavo_prompt_tokens_total", "Prompt tokens of requests.", registry=self.registry)
        self.generation_tokens = QuickCounter(
            "octavo_generation_tokens_total", "Output tokens.", registry=self.registry
        )
        self.constraints = Counter(
            "octavo_constraints_total",
            "Constraints of requests, by outcome: `compiled`, `cached` (compiled before), `refused`.",
            ["outcome"],
            registry=self.registry,
        )
        self.constraint_seconds = Histogram(
            "octavo_constraint_seconds",
            "Time to compile a constraint or refuse it, without the wait for a turn.",
            buckets=_COMPILE_BUCKETS,
            registry=self.registry,
        )
        self.malformed_tool_calls = Counter(
            "octavo_malformed_tool_calls_total",
            "Texts of parsed outputs that began as a tool call and broke.",
            registry=self.registry,
        )
        self.streams = Gauge("octavo_streams", "Requests that are live.", registry=self.registry)
        self.detached_streams = Gauge(
            "octavo_detached_streams",
            "Streams without a reader, which another one may attach to; those that have ended included.",
            registry=self.registry,
        )
        self.replica_ready = Gauge(
            "octavo_replica_ready", "1 if the replica takes and computes requests.", ["replica"], registry=self.registry
        )
        self.resubmissions = Counter(
            "octavo_resubmissions_total", "Streams moved to another replica.", registry=self.registry
        )
        self.migrations = Counter(
            "octavo_migrations_total",
            "Resubmissions of streams that their replica still had, by cause: `drain`, `stall`, `slow`, `asked`.",
            ["cause"],
            registry=self.registry,
        )
        self.replicas_left_out = Counter(
            "octavo_replicas_left_out_total",
            "Times a replica got no requests for a while because it failed repeatedly or stalled.",
            ["replica"],
            registry=self.registry,
        )
        self.quarantined = Gauge(
            "octavo_replica_quarantined",
            "1 if `octavo up` has stopped the replica for a while because it failed again and again.",
            ["replica"],
            registry=self.registry,
        )
        self.quarantines = FollowedCounter(
            "octavo_replica_quarantines_total", "Times that `octavo up` did so.", self.registry
        )
        self.replica_pace = Gauge(
            "octavo_replica_pace",
            "0: gets all requests that it may. For slow replicas, 1: fewer, 2: none, 3: a few probes.",
            ["replica"],
            registry=self.registry,
        )
        self.replica_slowness = Gauge(
            "octavo_replica_slowness",
            "Times as long as elsewhere that steps take, when last compared with those of other replicas.",
            ["replica"],
            registry=self.registry,
        )
        self.slow_replicas_left_out = Counter(
            "octavo_slow_replicas_left_out_total",
            "Times a replica got no requests for a while and handed its streams over because it was slow.",
            ["replica"],
            registry=self.registry,
        )
        self.parked_streams = Gauge(
            "octavo_router_held_streams",
            "Live requests that had begun and wait for a replica to take them.",
            registry=self.registry,
        )
        self.item_bytes = Gauge(
            "octavo_item_bytes",
            "Bytes of images and videos that this process holds for live requests.",
            registry=self.registry,
        )
        self.inexact_resumes = Counter(
            "octavo_inexact_resumes_total",
            "Streams that continued, by a move or a client's resume, on a replica of another fingerprint.",
            registry=self.registry,
        )
        self.routing_decisions = Counter(
            "octavo_routing_decisions_total",
            "Routing decisions, by policy and reason.",
            ["policy", "reason"],
            registry=self.registry,
        )
        self.lag = lag_histogram(self.registry)
        self._of_ended = _EndedRequestMetrics(self.registry)

    def observe_ended(self, ended: EndedRequest) -> None:
        """Observes a request that was a stream and has ended."""
        self._of_ended.observe(ended)


class _EndedRequestMetrics:
    """Observes each request once, when it ends."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._prompt_tokens = Histogram(
            "octavo_request_prompt_tokens", "Prompt tokens of a request.", buckets=_COUNT_BUCKETS, registry=registry
        )
        self._generation_tokens = Histogram(
            "octavo_request_generation_tokens",
            "Output tokens of a request, all choices together.",
            buckets=_COUNT_BUCKETS,
            registry=registry,
        )
        self._longest = Histogram(
            "octavo_request_max_num_generation_tokens",
            "Output tokens of a request's longest choice.",
            buckets=_COUNT_BUCKETS,
            registry=registry,
        )
        self._max_tokens = Histogram(
            "octavo_request_params_max_tokens", "max_tokens of a request.", buckets=_COUNT_BUCKETS, registry=registry
        )
        self._n = Histogram("octavo_request_params_n", "n of a request.", buckets=(1, 2, 5, 10, 20), registry=registry)
        self._time_per_output_token = Histogram(
            "octavo_request_time_per_output_token_seconds",
            "Mean over a request's tokens after its first one.",
            buckets=_TOKEN_BUCKETS,
            registry=registry,
        )

    def observe(self, ended: EndedRequest) -> None:
        sampling = ended.request.sampling
        self._prompt_tokens.observe(len(ended.request.prompt_token_ids))
        self._generation_tokens.observe(sum(ended.num_output_tokens))
        self._longest.observe(max(ended.num_output_tokens))
        self._max_tokens.observe(sampling.max_tokens)
        self._n.observe(sampling.n)
        if (seconds := ended.time_per_output_token) is not None:
            self._time_per_output_token.observe(seconds)


VLLM_NAMES = {
    "octavo_requests": ("vllm:request_success",),
    "octavo_time_to_first_token_seconds": ("vllm:time_to_first_token_seconds",),
    # The second is vLLM's name until 0.10.
    "octavo_inter_token_latency_seconds": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    "octavo_e2e_request_latency_seconds": ("vllm:e2e_request_latency_seconds",),
    "octavo_request_prompt_tokens": ("vllm:request_prompt_tokens",),
    "octavo_request_generation_tokens": ("vllm:request_generation_tokens",),
    "octavo_request_max_num_generation_tokens": ("vllm:request_max_num_generation_tokens",),
    "octavo_request_params_max_tokens": ("vllm:request_params_max_tokens",),
    "octavo_request_params_n": ("vllm:request_params_n",),
    "octavo_request_time_per_output_token_seconds": ("vllm:request_time_per_output_token_seconds",),
}

# vLLM's finished_reason by outcome; refused requests have none, for they never reach vLLM's engine.
_FINISHED_REASONS = {
    "stop": "stop",
    "length": "length",
    "repetition": "repetition",
    "cancelled": "abort",
    "deadline_exceeded": "abort",
    "aborted": "abort",
    "error": "error",
    "internal": "error",
}


def vllm_names(own: CollectorRegistry, model_name: str) -> VllmNames:
    # A router's streams may have been on several replicas, hence engine="all".
    labels = {"model_name": model_name, "engine": "all"}
    return VllmNames(own, VLLM_NAMES, lambda: labels, {"octavo_requests": _by_finished_reason})


def _by_finished_reason(labels: Mapping[str, str]) -> Mapping[str, str] | None:
    reason = _FINISHED_REASONS.get(labels["outcome"])
    return None if reason is None else {"finished_reason": reason}
