"""The bounds of a setting: limits of 99th percentiles, a rate of hits in the prefix cache, and no errors."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Requests that are lost or refused are no throughput.
_MOST_ERRORS = 0
_P50_P99 = (50, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Limits in milliseconds; inf: none. min_hit_rate: share of the prompts' tokens that the prefix cache must have."""

    ttft_ms: float = math.inf
    itl_ms: float = math.inf
    e2e_ms: float = math.inf
    min_hit_rate: float = 0.0

    @property
    def _limits(self) -> tuple[tuple[str, str, float], ...]:
        """Name, key of a measurement and limit."""
        return (
            ("TTFT", "ttft_ms_p99", self.ttft_ms),
            ("ITL", "itl_ms_p99", self.itl_ms),
            ("e2e", "e2e_ms_p99", self.e2e_ms),
        )

    def late(self, numbers: Mapping[str, Any]) -> list[str]:
        """The latencies (`as_measured`) that exceed their limits, as text for people."""
        return [
            f"{name} p99 {numbers[key]:,.4g} ms is above {limit:,.4g}"
            for name, key, limit in self._limits
            if numbers[key] > limit
        ]

    def broken_by(self, numbers: Mapping[str, Any]) -> list[str]:
        """All bounds that a measurement breaks, as text for people."""
        found = self.late(numbers)
        if numbers["num_errors"] > _MOST_ERRORS:
            found.append(f"{numbers['num_errors']} of {numbers['num_requests']} requests failed")
        if numbers["prefix_hit_rate"] < self.min_hit_rate:
            found.append(f"prefix hit rate {numbers['prefix_hit_rate']:.0%} is below {self.min_hit_rate:.0%}")
        return found

    def excess(self, numbers: Mapping[str, Any]) -> float:
        """The worst percentile as a share of its limit: 1 is at the limit, 0 has none; inf: another bound is broken."""
        worst = max(numbers[key] / limit for _, key, limit in self._limits)
        return math.inf if worst <= 1.0 and self.broken_by(numbers) else worst

    def as_json(self) -> dict[str, float]:
        """The bounds that are set, by flag."""
        values = {"max_ttft_ms": self.ttft_ms, "max_itl_ms": self.itl_ms, "max_e2e_ms": self.e2e_ms}
        found = {name: value for name, value in values.items() if value < math.inf}
        return found | ({"min_prefix_hit_rate": self.min_hit_rate} if self.min_hit_rate else {})


def as_measured(report: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers that matter of a report of `octavo bench serve`, or of a simulated run in the same keys."""
    names = ("num_requests", "num_errors", "prefix_hit_rate", "duration_s", "client_cpu")
    return {
        "output_tok_s": report["output_tok_s"],
        "requests_s": report["requests_s"],
        **{f"ttft_ms_p{p}": _times(report[f"ttft_s_p{p}"], 1e3) for p in _P50_P99},
        **{f"itl_ms_p{p}": _times(report[f"itl_ms_p{p}"], 1.0) for p in _P50_P99},
        **{f"e2e_ms_p{p}": _times(report[f"e2e_s_p{p}"], 1e3) for p in _P50_P99},
        **{name: report[name] for name in names if name in report},
    }


def _times(value: float | None, factor: float) -> float:
    """A time that nothing was measured for is 0: requests of one token have no time between tokens."""
    return 0.0 if value is None else round(value * factor, 3)


def lasting(rate: float, numbers: Mapping[str, Any]) -> float:
    """Output tokens a second that last at a rate that keeps the bounds: the rate times the tokens of an output.

    What a measurement's output_tok_s says is less: while the last requests are answered, no new ones come. At infinity
    that is all there is, and shared by all requests.
    """
    if math.isinf(rate) or not numbers["requests_s"]:
        return numbers["output_tok_s"]
    return rate * numbers["output_tok_s"] / numbers["requests_s"]
