"""How many tokens an output should still get, by the lengths of others."""

import numpy as np
import pytest

from scheduler.core.drafting.outputs import OutputLengths


def lengths_of(known: list[int]) -> OutputLengths:
    lengths = OutputLengths()
    for each in known:
        lengths.add(each)
    return lengths


def coming(lengths: OutputLengths, length: int) -> float:
    return float(lengths.coming(np.array([length]))[0])


def test_an_output_of_which_nothing_is_known_gets_as_many_as_it_has() -> None:
    for known in ([], [3, 4]):
        assert coming(lengths_of(known), 40) == 40


def test_it_is_the_mean_of_longer_ones_and_a_doubt() -> None:
    known = np.random.default_rng(1).integers(1, 200, 200).tolist()
    lengths = lengths_of(known)
    for length in (1, 2, 10, 57, 100, 180, 300):
        longer = [each - length for each in known if each > length]
        doubt = length / (1 + sum(2 / 3 * length < each <= length for each in known))
        assert coming(lengths, length) == pytest.approx((sum(longer) + doubt) / (len(longer) + 1))


def test_outputs_that_end_at_random_get_their_mean_at_every_length() -> None:
    known = np.random.default_rng(2).exponential(100, 256).round().astype(int).tolist()
    for length in (20, 50, 100, 150):
        assert coming(lengths_of(known), length) == pytest.approx(100, rel=0.25)


def test_near_the_usual_end_few_are_expected() -> None:
    lengths = lengths_of([100 + i % 5 for i in range(64)])
    assert 65 < coming(lengths, 30) < 75
    assert coming(lengths, 98) < 6
    assert coming(lengths, 110) < 3


def test_only_the_latest_count_also_after_a_restore() -> None:
    lengths = lengths_of([10] * 300 + [100] * 256)
    restored = OutputLengths()
    restored.restore(lengths.save())
    assert lengths.save() == [100] * 256
    for each in (lengths, restored):
        each.add(50)
        assert 85 < coming(each, 10) < 95
    assert coming(lengths, 60) == coming(restored, 60)
