"""Rates and quantiles of a cluster, from what `Observe` (protos/admin.proto) answers one time after the other."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from protos import admin_pb2 as pb
from runtime.telemetry.histograms import Buckets

# Seconds that rates and quantiles are taken over: short for rates, so that a change shows at once.
_RATE_S = 3.0
_QUANTILE_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """Seconds."""

    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, buckets: Buckets) -> "Quantiles | None":
        p50, p95, p99 = (buckets.quantile(q) for q in (0.5, 0.95, 0.99))
        return None if p50 is None or p95 is None or p99 is None else cls(p50=p50, p95=p95, p99=p99)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRates:
    """Per second; shares are 0 to 1, and None where nothing was counted."""

    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    preemptions: float = 0.0
    steps: float = 0.0
    hit_rate: float | None = None
    acceptance: float | None = None
    step_seconds: Quantiles | None = None
    lag: Quantiles | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRates:
    """replicas: in the order of the view."""

    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    time_to_first_token: Quantiles | None = None
    inter_token_latency: Quantiles | None = None
    lag: Quantiles | None = None
    replicas: tuple[ReplicaRates, ...] = field(default=())


class RateMeter:
    """Takes one view after the other."""

    def __init__(self) -> None:
        self._views: deque[tuple[float, pb.ObserveResponse]] = deque()

    def take(self, view: pb.ObserveResponse, now: float) -> ClusterRates:
        """now: seconds, never backwards. A router that has begun anew has no rates at first."""
        views = self._views
        if views and views[-1][1].router.router_id != view.router.router_id:
            views.clear()
        views.append((now, view))
        while now - views[0][0] > _QUANTILE_S:
            views.popleft()
        recent = next(each for each in views if now - each[0] <= _RATE_S)
        seconds, longest = now - recent[0], views[0][1]
        router = view.router
        return ClusterRates(
            prompt_tokens=_per_second(recent[1].router.num_prompt_tokens, router.num_prompt_tokens, seconds),
            output_tokens=_per_second(recent[1].router.num_output_tokens, router.num_output_tokens, seconds),
            time_to_first_token=_between(longest.router.time_to_first_token, router.time_to_first_token),
            inter_token_latency=_between(longest.router.inter_token_latency, router.inter_token_latency),
            lag=_between(longest.router.lag, router.lag),
            replicas=tuple(
                _replica(_find(recent[1].replicas, each), _find(longest.replicas, each), each, seconds)
                for each in view.replicas
            ),
        )


def _replica(recent: pb.ReplicaView, longest: pb.ReplicaView, now: pb.ReplicaView, seconds: float) -> ReplicaRates:
    new, old, oldest = now.totals, recent.totals, longest.totals
    num_drafts = new.num_speculated_tokens - oldest.num_speculated_tokens
    return ReplicaRates(
        prompt_tokens=_per_second(old.num_prompt_tokens, new.num_prompt_tokens, seconds),
        output_tokens=_per_second(old.num_output_tokens, new.num_output_tokens, seconds),
        preemptions=_per_second(old.num_preemptions, new.num_preemptions, seconds),
        steps=_per_second(old.num_steps, new.num_steps, seconds),
        hit_rate=_share(
            new.num_prefix_hits - oldest.num_prefix_hits, new.num_prefix_queries - oldest.num_prefix_queries
        ),
        acceptance=_share(new.num_accepted_tokens - oldest.num_accepted_tokens, num_drafts),
        step_seconds=_between(oldest.step_seconds, new.step_seconds),
        lag=_between(oldest.lag, new.lag),
    )


def _find(replicas: Sequence[pb.ReplicaView], like: pb.ReplicaView) -> pb.ReplicaView:
    """Returns the earlier view of the replica; itself if its scheduler has begun anew since, or was not observed."""
    for each in replicas:
        if each.address == like.address and each.is_observed and each.totals.num_steps <= like.totals.num_steps:
            return each
    return like


def _per_second(old: int, new: int, seconds: float) -> float:
    return max(new - old, 0) / seconds if seconds > 0 else 0.0


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole > 0 else None


def _between(old: pb.HistogramView, new: pb.HistogramView) -> Quantiles | None:
    return Quantiles.of(_buckets(new).since(_buckets(old)))


def _buckets(view: pb.HistogramView) -> Buckets:
    return Buckets(tuple(view.bounds), tuple(view.counts))
