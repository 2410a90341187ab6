"""When the steps in flight were sent, and for how long the workers have been at the oldest of them."""

from collections import deque


class StepClock:
    """Steps return in the order in which they were sent; a worker begins one when it has finished the one before."""

    def __init__(self) -> None:
        self._sent: deque[tuple[int, float]] = deque()
        self._last_return = 0.0

    @property
    def awaited(self) -> int | None:
        """The step whose result is next; None if none is in flight."""
        return self._sent[0][0] if self._sent else None

    def elapsed(self, now: float) -> float:
        """Seconds since the workers could begin the step that is awaited."""
        return now - max(self._sent[0][1], self._last_return) if self._sent else 0.0

    def send(self, step: int, now: float) -> None:
        self._sent.append((step, now))

    def finish(self, now: float) -> None:
        """The awaited step has returned."""
        self._sent.popleft()
        self._last_return = now

    def clear(self) -> None:
        """What was in flight is void."""
        self._sent.clear()
