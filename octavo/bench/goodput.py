"""Limits of single requests (SLOs), and goodput: the requests a second that keep all of them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from configs.load import ConfigError
from octavo.reports import RequestTrace

# e2el is vLLM's name of e2e.
_NAMES = ("ttft", "tpot", "itl", "e2e")
_ALIASES = {"e2el": "e2e"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Upper limits of one request, in seconds. ttft: time to the first token. tpot: mean time of a token after the
    first. itl: its longest time between tokens. e2e: time of the whole request."""

    ttft: float = math.inf
    tpot: float = math.inf
    itl: float = math.inf
    e2e: float = math.inf

    def are_kept(self, trace: RequestTrace) -> bool:
        """True if the request ended well within all limits."""
        if trace.error or not trace.token_times:
            return False
        decoding = trace.token_times[-1] - trace.token_times[0]
        num_gaps = trace.num_tokens - trace.token_counts[0]
        return (
            trace.ttft <= self.ttft
            and (not num_gaps or decoding / num_gaps <= self.tpot)
            and max(trace.itl, default=0.0) <= self.itl
            and trace.e2e <= self.e2e
        )

    def as_json(self, traces: Sequence[RequestTrace], duration: float) -> dict[str, object]:
        """Keys of a report: goodput_requests_s, and good_share, the share of all requests that are good."""
        good = sum(map(self.are_kept, traces))
        return {"goodput_requests_s": round(good / duration, 3), "good_share": round(good / len(traces), 4)}


def parse_limits(texts: Iterable[str], flag: str) -> RequestLimits:
    """Parses limits such as ttft:500 and e2e:2000, in milliseconds. Raises ConfigError."""
    found: dict[str, float] = {}
    for text in (part.strip() for each in texts for part in each.split(",")):
        name, _, number = text.partition(":")
        name = _ALIASES.get(name, name)
        try:
            milliseconds = float(number)
        except ValueError:
            milliseconds = 0.0
        if name not in _NAMES or not 0 < milliseconds < math.inf:
            raise ConfigError(
                f"{flag}={text!r}: give {', '.join(_NAMES)} with a limit in milliseconds, such as ttft:500,tpot:50"
            )
        found[name] = milliseconds / 1e3
    return RequestLimits(**found)
