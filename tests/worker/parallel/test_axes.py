"""The groups to which ranks belong, and the parts of dims that ranks hold."""

import pytest

from kernels.shard import Shard
from worker.parallel.axes import Axes


def test_eight_ranks_of_tensor_2_and_pipeline_4():
    axes = Axes(tensor_size=2, pipeline_size=4)
    assert axes.world_size == 8
    assert {axes.tensor_group(rank) for rank in range(8)} == {(0, 1), (2, 3), (4, 5), (6, 7)}
    assert {axes.pipeline_group(rank) for rank in range(8)} == {(0, 2, 4, 6), (1, 3, 5, 7)}
    assert [rank for rank in range(8) if axes.returns_results(rank)] == [6]
    assert all(rank in axes.tensor_group(rank) and rank in axes.pipeline_group(rank) for rank in range(8))
    assert [axes.stage(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_parts_cover_the_whole_once():
    parts = [Shard(rank, 3).of(12, "heads") for rank in range(3)]
    assert [*range(12)] == [i for part in parts for i in range(12)[part]]


def test_parts_that_need_not_be_equal_cover_the_whole_once_too():
    parts = [Shard(rank, 3).covering(101, "vocab_size") for rank in range(3)]
    assert [*range(101)] == [i for part in parts for i in range(101)[part]]
    with pytest.raises(ValueError, match=r"tensor_parallel_size=4 is too much for the model's vocab_size, 5"):
        Shard(0, 4).covering(5, "vocab_size")


def test_what_does_not_divide_is_refused_with_what_does():
    with pytest.raises(ValueError, match=r"tensor_parallel_size=4 does not divide the model's heads, 9; 1, 3, 9 do"):
        Shard(0, 4).of(9, "heads")
