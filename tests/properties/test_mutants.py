"""The random walks find every deliberate bug, and report nothing where there is none."""

import pytest

from tests.properties.mutants import MUTANTS
from tests.properties.mutation import Mutant, mutated_core
from tests.properties.walk import WalkError, walk

MOST_STEPS = 6_000


def test_there_are_enough_and_each_has_a_name_of_its_own():
    assert len(MUTANTS) >= 20
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_bug_is_found(mutant: Mutant):
    core_class, num_steps, index = mutated_core(mutant), 0, 0
    while num_steps < MOST_STEPS:
        seed = f"0/{index}"
        try:
            num_steps += walk(seed, core_class=core_class, changes=mutant.focus).num_steps
        except WalkError:
            # The correct core must survive the same walk.
            walk(seed, changes=mutant.focus)
            return
        index += 1
    pytest.fail(f"{mutant.name} survives {num_steps} steps: {mutant.why}")
