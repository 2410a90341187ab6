"""The delay after which refused clients are told to try again."""

from collections.abc import Callable

from router.intake.admission import RetryDelay


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def delay_of(clock: Clock, draw: Callable[[float, float], float] = lambda least, most: 1.0) -> RetryDelay:
    delay = RetryDelay(clock, draw)
    delay.note_busy()
    return delay


def finish(delay: RetryDelay, clock: Clock, count: int, seconds: float) -> None:
    """Finishes `count` requests, evenly spread over the seconds."""
    for _ in range(count):
        clock.now += seconds / count
        delay.note_finished()


def test_it_is_the_time_that_those_here_take_at_the_latest_rate():
    clock = Clock()
    delay = delay_of(clock)
    finish(delay, clock, 50, 5.0)
    assert abs(delay.seconds(30) - 3.0) < 0.01
    # The rate has dropped to 2/s: only recent finishes count.
    finish(delay, clock, 20, 10.0)
    assert abs(delay.seconds(30) - 15.0) < 1.0


def test_it_is_bounded_and_has_a_value_where_no_rate_is_known():
    clock = Clock()
    delay = delay_of(clock)
    assert delay.seconds(10_000) == 1.0
    finish(delay, clock, 1, 5.0)
    assert delay.seconds(10_000) == 30.0
    finish(delay, clock, 5000, 1.0)
    assert delay.seconds(1) == 0.2


def test_an_idle_time_before_says_nothing_of_the_rate():
    clock = Clock()
    delay = delay_of(clock)
    finish(delay, clock, 1, 1.0)
    clock.now += 9.0
    delay.note_busy()
    finish(delay, clock, 10, 1.0)
    assert abs(delay.seconds(20) - 2.0) < 0.01


def test_it_is_spread_around_that():
    drawn: list[tuple[float, float]] = []

    def draw(least: float, most: float) -> float:
        drawn.append((least, most))
        return most

    clock = Clock()
    delay = delay_of(clock, draw)
    finish(delay, clock, 10, 1.0)
    assert abs(delay.seconds(20) - 3.0) < 0.01
    assert drawn == [(0.5, 1.5)]
