"""What the processes tell of what they do: logs, metrics, traces of requests."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Field

from configs.groups.field import LOGS, option, split_commas

MetricsNames = Annotated[tuple[Literal["octavo", "vllm"], ...], BeforeValidator(split_commas), Field(min_length=1)]


class TelemetryOptions(BaseModel):
    """Validated with the others, in configs.options."""

    enable_log_requests: bool = option(
        LOGS, False, "A line in the router's log for each request that ends: id, parameters, tokens, outcome, times."
    )
    otlp_traces_endpoint: str = option(
        LOGS,
        "",
        "OpenTelemetry collector that router and schedulers send spans of requests to: http://HOST:4318/v1/traces, or "
        "grpc://HOST:4317 (https, grpcs: with TLS). Needs octavo[tracing]. Empty: off.",
    )
    metrics_names: MetricsNames = option(
        LOGS,
        ("octavo",),
        "Whose names /metrics of router and schedulers uses, comma-separated for both. octavo: its own. vllm: those of "
        "vLLM, for dashboards made for it.",
    )


class LogOptions(BaseModel):
    """Validated with the others, in configs.options."""

    log_level: Literal["debug", "info", "warning", "error"] = option(LOGS, "info", "Least severe level that is logged.")
    log_format: Literal["text", "json"] = option(
        LOGS, "text", "text for people, json (an object a line, with request ids) for collectors."
    )
    trace: str = option(
        LOGS,
        "",
        "File that each scheduler records its core's inputs and plans in, for `octavo replay`; the replica's number is "
        "put before the suffix. Empty: off.",
    )
    trace_max_mib: int = option(
        LOGS, 64, "Size at which a trace goes on in a new file; the one before it is kept as FILE.1.", ge=1, le=65_536
    )
    disable_log_stats: bool = option(LOGS, False, "No line of statistics every 10 s from each scheduler.")
    metrics_host: str = option(LOGS, "127.0.0.1", "Address that /metrics and /health bind to.")
    metrics_port: int = option(
        LOGS,
        9090,
        "Port of the first router's /metrics and /health; further routers, and processes of each, take the next ones, "
        "then schedulers, then workers. 0: off.",
        ge=0,
        le=65_535,
    )
