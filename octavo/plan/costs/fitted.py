"""A cost model fitted to measured steps: a sum of terms, each with a coefficient of 0 or more."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from octavo.plan.costs.samples import StepSample
from octavo.plan.costs.step_shape import StepShape

_PARTS = (
    "each step",
    "decode rows",
    "prefill tokens",
    "prefill rows",
    "sampling",
    "decode context",
    "prefill context",
    "prefill attention",
)
# Residuals beyond this many medians count less (Huber's weights): such steps met another process's burst of work.
_HUBER = 3.0
_NUM_REWEIGHTINGS = 5


def _terms(num_steps: int, shape: StepShape) -> tuple[int, ...]:
    """Terms in the order of _PARTS. They are linear: the terms of summed steps are the sums of their terms."""
    return (
        num_steps,
        shape.num_decodes,
        shape.num_prefill_tokens,
        shape.num_chunks,
        shape.num_sampled,
        shape.decode_context,
        shape.chunk_context,
        shape.attention_pairs,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A `CostModel` of one engine, and of the cluster around it: the engine's seconds times `factor`, plus seconds per
    step and per output token. Copies of KV between device and host (swap) are free in it."""

    # Seconds per unit of each part's term.
    coefficients: tuple[float, ...]
    # Median of |predicted - measured| / measured over the samples.
    median_error: float
    num_samples: int
    factor: float = 1.0
    step_seconds: float = 0.0
    token_seconds: float = 0.0

    @property
    def parts(self) -> tuple[str, ...]:
        return (*_PARTS, "around the engine")

    @property
    def num_stages(self) -> int:
        return 1

    @property
    def host_seconds(self) -> float:
        """0, because the measured steps include scheduling."""
        return 0.0

    def stage_seconds(self, shape: StepShape) -> Sequence[float]:
        terms = zip(self.coefficients, _terms(1, shape), strict=True)
        around = self.step_seconds + self.token_seconds * shape.num_sampled
        return [*(coefficient * term * self.factor for coefficient, term in terms), around]


def fit(samples: Sequence[StepSample]) -> Fitted:
    """Fits by least squares of relative errors, so that slow steps count no more than fast ones. Needs a sample."""
    terms = np.array([_terms(sample.num_steps, sample.shape) for sample in samples], np.float64)
    seconds = np.array([sample.seconds for sample in samples])
    relative = terms / seconds[:, None]
    # Without scaling, columns of very different size make the solver stop early.
    scale = np.maximum(relative.max(axis=0), 1e-300)
    weights = np.sqrt([sample.num_steps for sample in samples])
    trust = np.ones(len(samples))
    coefficients = np.zeros(len(_PARTS))
    for _ in range(_NUM_REWEIGHTINGS):
        factor = weights * np.sqrt(trust)
        coefficients = nnls(relative / scale * factor[:, None], factor)[0] / scale
        errors = np.abs(relative @ coefficients - 1.0)
        trust = np.minimum(1.0, _HUBER * max(float(np.median(errors)), 1e-9) / np.maximum(errors, 1e-12))
    return Fitted(
        coefficients=tuple(coefficients.tolist()),
        median_error=float(np.median(np.abs(relative @ coefficients - 1.0))),
        num_samples=len(samples),
    )
