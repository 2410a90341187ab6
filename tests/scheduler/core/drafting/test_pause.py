"""Pauses of drafters."""

from scheduler.core.drafting.choice import DraftingPause


def awake(pause: DraftingPause, num_steps: int, *, in_vain: bool = True) -> list[int]:
    """The steps, counted from 0, that are not part of a pause."""
    found = []
    for number in range(num_steps):
        if not pause.covers():
            found.append(number)
            pause.note(in_vain=in_vain)
    return found


def test_pauses_grow_up_to_a_bound_while_all_is_in_vain() -> None:
    assert awake(DraftingPause(), 30) == [0, 2, 6, 13, 20, 27]


def test_what_is_not_in_vain_leads_to_no_pause() -> None:
    pause = DraftingPause()
    awake(pause, 8)
    pause.end()
    assert awake(pause, 10, in_vain=False) == list(range(10))
    assert not pause.is_on
    # The next pauses are short ones again.
    assert awake(pause, 7) == [0, 2, 6]
    assert pause.length == 6
