"""Room that callers share by weight."""

import math
from fractions import Fraction

import pytest

from runtime.shares import SharedRoom


def _fill(room: SharedRoom, **weights: float) -> dict[str, int]:
    """Fills the room; each caller gives back a unit at a time and takes again what it may, until nothing changes."""
    for _ in range(room.size):
        for caller, weight in weights.items():
            if room.of(caller):
                room.give_back(caller, 1)
            for _ in range(2):
                room.take(caller, 1, weight)
    return {caller: room.of(caller) for caller in weights}


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ({"a": 1.0}, ["1/2"]),
        ({"a": 1.0, "b": 1.0}, ["1/3", "1/3"]),
        ({"a": 1.0, "b": 3.0}, ["1/5", "3/5"]),
        ({"a": math.inf}, ["1"]),
    ],
)
def test_each_gets_what_is_free_times_its_weight(weights: dict[str, float], shares: list[str]) -> None:
    room = SharedRoom(3000)
    taken = _fill(room, **weights)
    assert list(taken.values()) == pytest.approx([3000 * float(Fraction(share)) for share in shares], abs=4)
    for caller, amount in taken.items():
        room.give_back(caller, amount)
    assert room.total == 0


def test_there_is_room_for_the_next_one_and_never_more_than_all() -> None:
    room = SharedRoom(90)
    _fill(room, a=1.0)
    assert room.take("b", 20)
    assert not room.take("b", 10)
    assert not room.take("c", 26, 100.0)
    assert room.total == 65
