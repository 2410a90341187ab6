"""Measures how long a replica's steps take for their size, and compares replicas. Pure: time is an input."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from protos.scheduler_pb2 import Load

# A window has this many samples, each the mean over the steps of a tenth of it.
SAMPLES_A_WINDOW = 10
# Fewer samples, or older ones than this many windows, say nothing.
_LEAST_SAMPLES = 5
_OLDEST_WINDOWS = 3
# Steps shorter than this count as this long: what a busy machine adds to them is no sign of slowness.
_LEAST_STEP_S = 0.005


@dataclass(frozen=True, slots=True)
class Sample:
    """Means per step."""

    seconds: float
    num_tokens: float
    # Tokens whose KV the step reads.
    num_context_tokens: float


class StepTimes:
    """The samples of a replica, made from the totals in its Loads."""

    def __init__(self, window: float) -> None:
        """window: seconds."""
        self._window = window
        self._samples: deque[Sample] = deque(maxlen=SAMPLES_A_WINDOW)
        # The beginning of the next sample.
        self._began, self._before = 0.0, Load()
        self._last_at = 0.0
        self._typical: Sample | None = None

    def restart(self, now: float, load: Load) -> None:
        """Drops all samples. load: holds the totals to count from."""
        self._samples.clear()
        self._typical = None
        self._begin(now, load)

    def note(self, now: float, load: Load) -> bool:
        """Takes in the latest totals. Returns True if they complete a sample."""
        before = self._before
        num_steps = load.last_step - before.last_step
        if num_steps <= 0:
            # Idle, or a new scheduler at the same place.
            self._begin(now, load)
            return False
        if now - self._began < self._window / SAMPLES_A_WINDOW:
            return False
        if now - self._last_at > _OLDEST_WINDOWS * self._window:
            self._samples.clear()
        self._samples.append(
            Sample(
                (load.step_seconds - before.step_seconds) / num_steps,
                (load.step_tokens - before.step_tokens) / num_steps,
                (load.step_context_tokens - before.step_context_tokens) / num_steps,
            )
        )
        self._last_at, self._typical = now, _medians(self._samples)
        self._begin(now, load)
        return True

    def samples(self, now: float) -> Sequence[Sample]:
        """Returns the recent samples; none if there are too few to say anything."""
        is_recent = now - self._last_at <= _OLDEST_WINDOWS * self._window
        return self._samples if is_recent and len(self._samples) >= _LEAST_SAMPLES else ()

    def typical(self, now: float) -> Sample | None:
        """Returns the medians of `samples`; None if there are too few."""
        return self._typical if self.samples(now) else None

    def _begin(self, now: float, load: Load) -> None:
        self._began = now
        if load.last_step != self._before.last_step:
            self._before = Load()
            self._before.CopyFrom(load)


def slowness(own: Sequence[Sample], other: Sample) -> float:
    """Returns how many times as long as `other` these steps take, at least: the median over them.

    A step with k times the tokens takes at most k times as long, because the fixed part of its time does not grow; a
    smaller one takes at most as long. So longer batches do not look like slowness.
    """
    return median(sample.seconds / _longest(sample, other) for sample in own)


def _longest(sample: Sample, other: Sample) -> float:
    """Returns how long a step of the size of `sample` may take where one like `other` takes as long as that."""
    times_larger = max(
        1.0,
        _ratio(sample.num_tokens, other.num_tokens),
        _ratio(sample.num_context_tokens, other.num_context_tokens),
    )
    return times_larger * max(other.seconds, _LEAST_STEP_S)


def _ratio(one: float, other: float) -> float:
    return one / other if other else float("inf" if one else 1)


def _medians(samples: Sequence[Sample]) -> Sample:
    return Sample(
        median(sample.seconds for sample in samples),
        median(sample.num_tokens for sample in samples),
        median(sample.num_context_tokens for sample in samples),
    )
