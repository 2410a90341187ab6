"""The router's Prometheus metrics, in a registry of their own."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from router.quick_metrics import QuickCounter, QuickHistogram
from router.telemetry.ended import EndedRequest

_TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_BUCKETS = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 5.0)
_COUNT_BUCKETS = tuple(mantissa * 10**exponent for exponent in range(6) for mantissa in (1, 2, 5))
_REQUEST_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 600.0)


class RouterMetrics:
    """Times are in seconds; tokens are counted as they are handed to clients."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "octavo_requests_total",
            "Requests that ended: `stop`, `length` and so on by their first choice's finish, else the gRPC status.",
            ["outcome"],
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
        self.streams = Gauge("octavo_streams", "Requests that are live.", registry=self.registry)
        self.replica_ready = Gauge(
            "octavo_replica_ready", "1 if the replica takes and computes requests.", ["replica"], registry=self.registry
        )
        self.resubmissions = Counter(
            "octavo_resubmissions_total", "Streams moved to another replica.", registry=self.registry
        )
        self.migrations = Counter(
            "octavo_migrations_total",
            "Of these, streams that left a replica which still had them: for its `drain` or `stall`, or `asked` for.",
            ["cause"],
            registry=self.registry,
        )
        self.replicas_left_out = Counter(
            "octavo_replicas_left_out_total",
            "Times that a replica was to get no requests for a while, for it failed again and again or stalled.",
            ["replica"],
            registry=self.registry,
        )
        self.held_streams = Gauge(
            "octavo_router_held_streams",
            "Live requests that had begun and wait for a replica that takes them.",
            registry=self.registry,
        )
        self.inexact_resumes = Counter(
            "octavo_inexact_resumes_total",
            "Streams that went on, here or by a client's resume, on a replica of another fingerprint.",
            registry=self.registry,
        )
        self.routing_decisions = Counter(
            "octavo_routing_decisions_total",
            "Choices of a replica.",
            ["policy", "reason"],
            registry=self.registry,
        )
        self._of_ended = _OfEnded(self.registry)

    def observe_ended(self, ended: EndedRequest) -> None:
        """A request that was a stream is over."""
        self._of_ended.observe(ended)


class _OfEnded:
    """What is observed once a request, when it is over."""

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
