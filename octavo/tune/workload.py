"""The requests of a tuning run, the same for predictions and measurements."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from octavo.bench.arrivals import Arrivals
from octavo.bench.datasets.request import BenchRequest, Dataset
from octavo.bench.serve import Load
from octavo.lab.errors import TuningError
from octavo.plan.workload import NO_PREFIX, Workload

# Token ids of texts in predictions: what they are does not matter, that they differ does.
_MADE_UP = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneWorkload:
    """A dataset. Its own times, if it has any, are stretched to the rate that is asked for."""

    dataset: Dataset
    num_requests: int
    vocab_size: int
    # Longer requests, with their outputs, are left out.
    max_model_len: int
    seed: int = 0
    burstiness: float = 1.0
    # Drawn once.
    _drawn: list[BenchRequest] = field(default_factory=list)

    def requests(self, rate: float, *, share: float = 1.0) -> list[BenchRequest]:
        """Requests with their times, the same ones in each measurement. share: the part of num_requests that is
        sent. Raises TuningError if none fits the model."""
        if not self._drawn:
            found = self.dataset.requests(self.num_requests, self.seed, vocab_size=self.vocab_size, as_text=False)
            self._drawn.extend(each for each in found if each.prompt_len + each.output_len <= self.max_model_len)
            if not self._drawn:
                raise TuningError(f"every request, with its output, is longer than max_model_len={self.max_model_len}")
        requests = self._drawn[: max(1, round(share * len(self._drawn)))]
        return [replace(each, at=at) for each, at in zip(requests, self._times(requests, rate), strict=True)]

    def _times(self, requests: Sequence[BenchRequest], rate: float) -> list[float]:
        if rate == math.inf:
            return [0.0] * len(requests)
        times = [each.at for each in requests if each.at is not None]
        if len(times) == len(requests) and times[-1] > times[0]:
            stretch = (len(times) - 1) / (times[-1] - times[0]) / rate
            return [(at - times[0]) * stretch for at in times]
        return Arrivals(rate=rate, burstiness=self.burstiness).times(len(requests), self.seed)

    @property
    def longest(self) -> int:
        """Tokens of the longest request with its output."""
        return max(each.prompt_len + each.output_len for each in self.requests(math.inf))

    def load(self, rate: float, *, share: float = 1.0) -> Load:
        """The requests that `octavo.bench.serve.measure` sends."""
        prepared = _Prepared(requests_=self.requests(rate, share=share), name=self.dataset.name)
        return Load(num_requests=len(prepared.requests_), dataset=prepared, seed=self.seed)

    def paper(self, rate: float, *, share: float = 1.0) -> Workload:
        """The workload that `octavo.plan.simulate.simulate` runs."""
        return paper_workload(self.requests(rate, share=share))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """A dataset of requests that are there already."""

    requests_: list[BenchRequest]
    name: str
    is_drawn: bool = False

    def requests(self, count: int, seed: int, *, vocab_size: int, as_text: bool) -> list[BenchRequest]:
        return self.requests_


def paper_workload(requests: Sequence[BenchRequest]) -> Workload:
    count = len(requests)
    prompts = [
        # Texts have made-up tokens.
        [_MADE_UP + index] * each.prompt_len if isinstance(each.prompt, str) else each.prompt
        for index, each in enumerate(requests)
    ]
    return Workload(
        arrivals=np.array([each.at or 0.0 for each in requests]),
        prompt_lens=np.array([each.prompt_len for each in requests]),
        output_lens=np.array([each.output_len for each in requests]),
        prefix_ids=np.full(count, NO_PREFIX),
        prefix_lens=np.zeros(count, np.int64),
        prompts=prompts,
    )
