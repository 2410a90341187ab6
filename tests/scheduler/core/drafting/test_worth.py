"""What drafts were worth lately: trust in estimates, and pauses."""

from scheduler.core.drafting.worth import Worth


def awake(worth: Worth, num_steps: int, *, has_drafts: bool = False) -> list[int]:
    """The steps, counted from 0, that are not part of a pause."""
    found = []
    for number in range(num_steps):
        if not worth.pauses():
            found.append(number)
            worth.note_step(has_drafts=has_drafts)
    return found


def test_pauses_grow_up_to_a_bound_while_no_step_has_drafts() -> None:
    assert awake(Worth(), 30) == [0, 2, 6, 13, 20, 27]


def test_steps_with_drafts_lead_to_no_pause() -> None:
    worth = Worth()
    assert awake(worth, 10, has_drafts=True) == list(range(10))
    assert not worth.is_pausing
    # The next pauses are short ones again.
    assert awake(worth, 7) == [0, 2, 6]


def test_estimates_are_trusted_as_far_as_they_came_true() -> None:
    worth = Worth()
    assert worth.trust == 1.0
    for _ in range(1000):
        worth.note_verified(4.0, 3)
    assert 0.74 < worth.trust < 0.76


def test_what_was_better_than_promised_makes_up_for_nothing_later() -> None:
    worth, other = Worth(), Worth()
    for _ in range(1000):
        worth.note_verified(1.0, 2)
        other.note_verified(1.0, 1)
    assert worth.trust == 1.0
    for each in (worth, other):
        for _ in range(100):
            each.note_verified(1.0, 0)
    assert worth.trust < 0.62
    assert other.trust < 0.62


def test_a_saved_one_goes_on_as_the_restored_one() -> None:
    worth, other = Worth(), Worth()
    for _ in range(30):
        worth.note_verified(3.0, 2)
    awake(worth, 8)
    other.restore(*worth.save())
    assert other.trust == worth.trust < 1
    assert awake(worth, 20) == awake(other, 20)
