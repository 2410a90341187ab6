"""The times at which requests arrive: at random, in bursts, at a rate that rises or falls."""

import math
from dataclasses import dataclass

import numpy as np

from octavo.lab.flags import Ramp


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """A process of arrivals. Times between them are gamma distributed, as in vLLM's benchmark.

    rate: requests per second; inf: all at once. burstiness: the shape of the distribution. 1 makes it a Poisson
    process, less makes bursts, more makes it even. ramp: the rate begins as `rate` and ends as ramp_to.
    """

    rate: float
    burstiness: float = 1.0
    ramp: Ramp | None = None
    ramp_to: float = math.inf

    def times(self, count: int, seed: int) -> list[float]:
        """Seconds from the start, increasing."""
        if self.rate == math.inf:
            return [0.0] * count
        shape = self.burstiness
        # The mean is 1. A Poisson process is drawn as it always was.
        random = np.random.default_rng(seed)
        gaps = random.exponential(1.0, count) if shape == 1 else random.gamma(shape, 1.0 / shape, count)
        return (gaps / self._rates(count)).cumsum().tolist()

    def _rates(self, count: int) -> np.ndarray:
        progress = np.arange(count) / max(count - 1, 1)
        match self.ramp:
            case None:
                return np.full(count, self.rate)
            case Ramp.LINEAR:
                return self.rate + (self.ramp_to - self.rate) * progress
            case Ramp.EXPONENTIAL:
                return self.rate * (self.ramp_to / self.rate) ** progress
