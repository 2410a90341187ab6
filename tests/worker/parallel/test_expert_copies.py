"""The home ranks of experts, and the placement of their copies."""

import numpy as np
import pytest
import torch

from worker.parallel.expert_placement import ExpertPlacement, balanced


def _loads(placement: ExpertPlacement, tokens: list[int]) -> list[float]:
    """Each rank's load, in tokens, if an expert's tokens are spread evenly over its slots."""
    loads = [0.0] * placement.num_ranks
    counts = placement.experts_S[placement.experts_S >= 0].bincount()
    for slot, expert in enumerate(placement.experts_S.tolist()):
        if expert >= 0:
            loads[int(placement.ranks_S[slot])] += tokens[expert] / int(counts[expert])
    return loads


def test_slots_are_dealt_out_evenly_and_each_expert_keeps_its_home() -> None:
    placement = ExpertPlacement(5, 4, 3)
    assert placement.experts_S.tolist() == [0, 1, 2, -1, 3, -1, 4, -1]
    assert placement.ranks_S.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert placement.homes_N.tolist() == [0, 0, 1, 2, 3]
    assert placement.with_copies({3: 0, 7: 0}).copies == {3: 0, 7: 0}


def test_tokens_of_an_expert_take_its_slots_one_after_the_other() -> None:
    placement = ExpertPlacement(4, 2, 2).with_copies({2: 3})
    experts_DTK = torch.tensor([[[0, 3], [0, 3], [1, 3], [-1, -1]]])
    assert placement.slots(experts_DTK).tolist() == [[[0, 2], [0, 4], [1, 2], [-1, -1]]]


@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "num_redundant", "tokens"),
    [
        (4, 2, 2, [100, 10, 10, 10]),
        (8, 4, 4, [400, 1, 1, 1, 200, 1, 1, 1]),
        (5, 4, 3, [7, 900, 3, 3, 3]),
        (16, 4, 8, [int(1000 / rank) for rank in range(1, 17)]),
    ],
)
def test_copies_take_load_from_the_busiest_rank(
    num_experts: int, num_ranks: int, num_redundant: int, tokens: list[int]
) -> None:
    empty = ExpertPlacement(num_experts, num_ranks, num_redundant)
    placed = balanced(empty, np.array(tokens))
    assert placed.copies == balanced(empty, np.array(tokens)).copies
    assert max(_loads(placed, tokens)) < max(_loads(empty, tokens))
    assert sum(_loads(placed, tokens)) == pytest.approx(sum(tokens))
    for rank in range(num_ranks):
        slots = [*placed.home_slots_of(rank), *placed.copy_slots_of(rank)]
        held = [expert for expert in placed.experts_S[slots].tolist() if expert >= 0]
        assert len(held) == len(set(held))


def test_nothing_is_copied_for_nobody() -> None:
    assert balanced(ExpertPlacement(4, 2, 2), np.zeros(4, np.int64)).copies == {}


def test_more_ranks_than_experts_are_refused_with_how_many_would_do() -> None:
    with pytest.raises(ValueError, match=r"enable_expert_parallel: .* 3 experts .* over 4 ranks .*; 3 ranks or less"):
        ExpertPlacement(3, 4)
