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
