"""Rates are of the last seconds, and begin anew with a router or a scheduler that does."""

import pytest

from protos import admin_pb2 as pb
from runtime.telemetry.rates import RateMeter


def view(router_id: str, num_tokens: int, *, steps: int = 0, hits: int = 0, slow: int = 0) -> pb.ObserveResponse:
    totals = pb.ReplicaTotals(
        num_output_tokens=num_tokens, num_steps=steps, num_prefix_hits=hits, num_prefix_queries=2 * hits
    )
    return pb.ObserveResponse(
        router=pb.RouterView(
            router_id=router_id,
            num_output_tokens=num_tokens,
            inter_token_latency=pb.HistogramView(bounds=[0.1, 0.2], counts=[0, slow, 0]),
        ),
        replicas=[pb.ReplicaView(address="a", is_observed=True, totals=totals)],
    )


def test_rates_follow_the_last_seconds() -> None:
    meter = RateMeter()
    first = meter.take(view("r", 1000), 0.0)
    assert (first.output_tokens, first.inter_token_latency, first.replicas[0].hit_rate) == (0.0, None, None)
    second = meter.take(view("r", 1100, steps=5, hits=8, slow=10), 2.0)
    assert second.output_tokens == second.replicas[0].output_tokens == 50.0
    assert (second.replicas[0].steps, second.replicas[0].hit_rate) == (2.5, 0.5)
    assert second.inter_token_latency is not None
    assert second.inter_token_latency.p50 == pytest.approx(0.15)
    # Quantiles remember longer than rates.
    third = meter.take(view("r", 1100, steps=5, hits=8, slow=10), 6.0)
    assert third.output_tokens == 0.0
    assert third.inter_token_latency == second.inter_token_latency
    assert meter.take(view("r", 1100, steps=5, hits=8, slow=10), 60.0).inter_token_latency is None


def test_what_begins_anew_has_no_rates_at_first() -> None:
    meter = RateMeter()
    meter.take(view("r", 1000, steps=50), 0.0)
    restarted_scheduler = meter.take(view("r", 1010, steps=1), 1.0)
    assert (restarted_scheduler.output_tokens, restarted_scheduler.replicas[0].output_tokens) == (10.0, 0.0)
    assert meter.take(view("another", 5, steps=2), 2.0).output_tokens == 0.0
