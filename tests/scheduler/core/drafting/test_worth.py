"""What drafts were worth lately: trust in estimates, and pauses."""

from scheduler.core.drafting.worth import Worth


def steps_until_pause(worth: Worth, gain: float, most: int = 1000) -> int:
    for number in range(most):
        if worth.pauses():
            return number
        worth.note_gain(gain)
    return most


def length_of_pause(worth: Worth) -> int:
    """The steps of a pause whose first one has been counted."""
    length = 1
    while worth.pauses():
        length += 1
    return length


def test_drafts_that_gain_nothing_lead_to_pauses_which_grow_up_to_a_bound() -> None:
    worth = Worth()
    assert steps_until_pause(worth, 1.0) == 25
    assert length_of_pause(worth) == 16
    lengths = []
    for _ in range(4):
        # The step after a pause is watched already.
        worth.note_gain(1.0)
        assert steps_until_pause(worth, 1.0) == 14
        lengths.append(length_of_pause(worth))
    assert lengths == [32, 64, 64, 64]


def test_drafts_that_gain_something_lead_to_none() -> None:
    assert steps_until_pause(Worth(), 1.03) == 1000


def test_one_good_step_in_a_pauses_watch_keeps_the_drafters_awake() -> None:
    worth = Worth()
    steps_until_pause(worth, 1.0)
    length_of_pause(worth)
    worth.note_gain(1.0)
    worth.note_gain(2.0)
    # Pauses begin anew, with the shortest.
    assert 20 < steps_until_pause(worth, 1.0) < 60
    assert length_of_pause(worth) == 16


def test_estimates_are_trusted_as_far_as_they_came_true() -> None:
    worth = Worth()
    assert worth.trust == 1.0
    for _ in range(1000):
        worth.note_verified(4.0, 3)
    assert 0.74 < worth.trust < 0.77
    for _ in range(4000):
        worth.note_verified(1.0, 2)
    # Never more than they promise.
    assert worth.trust == 1.0


def test_a_saved_one_goes_on_as_the_restored_one() -> None:
    worth, other = Worth(), Worth()
    for _ in range(30):
        worth.note_verified(3.0, 2)
        worth.note_gain(1.0)
    other.restore(*worth.save())
    assert other.trust == worth.trust < 1
    for gain in (1.0, 1.4, *[1.0] * 60):
        assert worth.pauses() == other.pauses()
        worth.note_gain(gain)
        other.note_gain(gain)
