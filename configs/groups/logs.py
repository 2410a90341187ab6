"""Options of what the processes report: logs, metrics, traces of requests."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Field

from configs.groups.field import LOGS, option, split_commas

MetricsNames = Annotated[tuple[Literal["octavo", "vllm"], ...], BeforeValidator(split_commas), Field(min_length=1)]


class TelemetryOptions(BaseModel):
    """Part of configs.options.Options, which validates all groups."""

    enable_log_requests: bool = option(
        LOGS, False, "Log a line in the router for each request that ends: id, parameters, tokens, outcome, times."
    )
    otlp_traces_endpoint: str = option(
        LOGS,
        "",
        "OpenTelemetry collector to which routers and schedulers send spans of requests: http://HOST:4318/v1/traces, "
        "or grpc://HOST:4317 (https, grpcs: with TLS). Needs octavo[tracing]. Empty: off.",
    )
    metrics_names: MetricsNames = option(
        LOGS,
        ("octavo",),
        "Names of the metrics that routers and schedulers serve, comma-separated for both. octavo: our own. vllm: "
        "vLLM's, for dashboards made for it.",
    )


class LogOptions(BaseModel):
    """Part of configs.options.Options, which validates all groups."""

    log_level: Literal["debug", "info", "warning", "error"] = option(LOGS, "info", "Lowest level to log.")
    log_format: Literal["text", "json"] = option(
        LOGS, "text", "text: for people. json: one object per line, with request ids, for collectors."
    )
    trace: str = option(
        LOGS,
        "",
        "File to which each scheduler records its core's inputs and plans, for `octavo replay`; the replica's number "
        "is put before the suffix. Empty: off.",
    )
    trace_max_mib: int = option(
        LOGS, 64, "MiB after which a trace continues in a new file; the last one is kept as FILE.1.", ge=1, le=65_536
    )
    disable_log_stats: bool = option(LOGS, False, "Do not log statistics in each scheduler every 10 s.")
    metrics_host: str = option(LOGS, "127.0.0.1", "Address that the servers of /metrics and /health bind to.")
    metrics_port: int = option(
        LOGS,
        9090,
        "Port of the first router's /metrics and /health. The next ports go to its other processes and to the other "
        "routers, then to schedulers, then to workers. 0: off.",
        ge=0,
        le=65_535,
    )
