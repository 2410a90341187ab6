"""Balanced experts: complete, even, and the same wherever they are computed."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.parallel.expert_balance import BalancedExperts, balance_experts, loads_of_ranks


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    """A layer's loads, the number of slots, the number of ranks."""
    num_ranks = draw(st.integers(1, 6))
    num_experts = num_ranks * draw(st.integers(1, 5))
    num_slots = num_experts + num_ranks * draw(st.integers(0, 3))
    loads = draw(st.lists(st.integers(0, 50), min_size=num_experts, max_size=num_experts))
    return np.array([loads]), num_slots, num_ranks


def in_order(load_N: np.ndarray, num_ranks: int) -> np.ndarray:
    return loads_of_ranks(load_N, np.arange(len(load_N)), num_ranks)


def balance(load_LN: np.ndarray, num_slots: int, num_ranks: int) -> BalancedExperts:
    return balance_experts(load_LN, num_slots=num_slots, num_ranks=num_ranks)


@settings(max_examples=150, deadline=None)
@given(problems())
def test_each_expert_has_a_slot_and_both_directions_say_the_same(problem: tuple[np.ndarray, int, int]):
    load_LN, num_slots, num_ranks = problem
    found = balance(*problem)
    assert found.physical_to_logical_LS.shape == (1, num_slots)
    assert found.num_copies_LN.min() >= 1
    assert found.num_copies_LN.sum() == num_slots
    for expert, slots_C in enumerate(found.logical_to_physical_LNC[0]):
        used = [slot for slot in slots_C if slot >= 0]
        assert len(used) == found.num_copies_LN[0, expert]
        assert all(first < second for first, second in pairwise(used))
        assert all(found.physical_to_logical_LS[0, slot] == expert for slot in used)
    again = balance(load_LN.copy(), num_slots, num_ranks)
    assert np.array_equal(found.physical_to_logical_LS, again.physical_to_logical_LS)


@settings(max_examples=150, deadline=None)
@given(problems())
def test_no_rank_has_an_expert_twice_as_long_as_that_can_be(problem: tuple[np.ndarray, int, int]):
    load_LN, num_slots, num_ranks = problem
    slots_S = balance(*problem).physical_to_logical_LS[0]
    has_twins = any(len(set(rank)) < len(rank) for rank in slots_S.reshape(num_ranks, -1))
    if has_twins and num_slots <= load_LN.shape[1] * num_ranks:
        # The copies change nothing where others would have made the busiest rank busier.
        loads = loads_of_ranks(load_LN[0], slots_S, num_ranks)
        assert loads == pytest.approx(in_order(load_LN[0], num_ranks))


@settings(max_examples=300, deadline=None)
@given(problems())
def test_the_busiest_rank_has_no_more_to_do_than_with_experts_in_their_order(problem: tuple[np.ndarray, int, int]):
    load_LN, _, num_ranks = problem
    most = loads_of_ranks(load_LN[0], balance(*problem).physical_to_logical_LS[0], num_ranks).max()
    assert most <= in_order(load_LN[0], num_ranks).max() + 1e-9


def test_hot_experts_have_copies_and_ranks_are_even():
    load_LN = np.array([[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86]])
    found = balance(load_LN, 16, 8)
    assert found.num_copies_LN[0].tolist() == [1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1]
    loads = loads_of_ranks(load_LN[0], found.physical_to_logical_LS[0], 8)
    assert loads.max() / loads.mean() < 1.3
    # Loads of 0, and slots for more copies than there are ranks.
    assert balance(np.zeros((1, 2)), 8, 2).num_copies_LN.tolist() == [[4, 4]]


def test_groups_stay_on_a_node():
    """Otherwise tokens of one group would go to several nodes."""
    generator = np.random.default_rng(0)
    load_LN = generator.integers(1, 100, (3, 24))
    found = balance_experts(load_LN, num_slots=32, num_ranks=8, num_nodes=2, num_groups=4)
    for layer, slots_S in enumerate(found.physical_to_logical_LS):
        first, second = ({int(expert) // 6 for expert in node} for node in slots_S.reshape(2, -1))
        assert len(first) == len(second) == 2
        assert not first & second
        assert loads_of_ranks(load_LN[layer], slots_S, 8).max() <= in_order(load_LN[layer], 8).max()


@pytest.mark.parametrize(
    ("slots", "ranks", "nodes", "groups", "complaint"),
    [
        (7, 1, 1, 1, "num_slots=7"),
        (9, 2, 1, 1, "num_slots=9"),
        (8, 4, 3, 1, "num_nodes=3"),
        (8, 4, 2, 3, "num_groups=3"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(slots: int, ranks: int, nodes: int, groups: int, complaint: str):
    with pytest.raises(ValueError, match=complaint):
        balance_experts(np.ones((1, 8)), num_slots=slots, num_ranks=ranks, num_nodes=nodes, num_groups=groups)
