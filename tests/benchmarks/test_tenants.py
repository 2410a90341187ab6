"""A tenant keeps its share while another one sends ten times as many requests: a short form of
benchmarks.router.tenants, in virtual time."""

import pytest

from benchmarks.router.tenants.virtual import measure


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_a_tenant_keeps_its_share_beside_one_that_sends_ten_times_as_much(weight: float) -> None:
    kept = measure(weight=weight, seconds=4.0)
    # Before, and still without keys: 0.2.
    assert kept.without_shares < 0.4 * kept.alone
    assert kept.share >= 0.9
    # What the small one leaves is not lost.
    assert kept.beside + kept.large > 0.9 * kept.offered * (weight + 1) / weight
