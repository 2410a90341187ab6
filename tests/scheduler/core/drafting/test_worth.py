"""Trust in the estimates of drafts."""

from scheduler.core.drafting.choice import DraftTrust


def test_estimates_are_trusted_as_far_as_they_came_true() -> None:
    worth = DraftTrust()
    assert worth.trust == 1.0
    for _ in range(1000):
        worth.note_verified(4.0, 3)
    assert 0.74 < worth.trust < 0.76


def test_what_was_better_than_promised_makes_up_for_nothing_later() -> None:
    worth, other = DraftTrust(), DraftTrust()
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
    worth, other = DraftTrust(), DraftTrust()
    for _ in range(30):
        worth.note_verified(3.0, 2)
    other.restore(*worth.save())
    assert other.trust == worth.trust < 1
