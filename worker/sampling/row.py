"""How a row that is new in a step samples: its parameters, checked and resolved."""

from dataclasses import dataclass

from configs.sampling import BY_NAME, MAX_LOGPROBS, out_of_range
from worker.errors import PlanError
from worker.sampling.feature import MIN_TEMPERATURE, Adjustment, NewRow
from worker.sampling.features import adjustments_of

# Errors show it as the least number above 0, where 0 itself is out of range.
_LEAST = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSampling:
    row: int
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # uint64
    choice: int = 0
    # So many most likely tokens with logprobs beside the chosen one's; None: no logprobs.
    num_logprobs: int | None = None
    # What changes its logits before temperature, in order.
    adjustments: tuple[Adjustment, ...] = ()


def resolve_sampling(row: int, choice: int, new: NewRow) -> RowSampling:
    """Raises PlanError, naming the field, for a value that is missing or out of range."""
    sampling = new.sampling
    if not sampling.HasField("seed") and sampling.temperature >= MIN_TEMPERATURE:
        raise PlanError(f"new_rows: row {row} samples at temperature {sampling.temperature:g} without a seed")
    if (wrong := out_of_range(sampling)) is not None:
        parameter, value = wrong
        low = _LEAST if parameter.low_is_open else parameter.low
        raise PlanError(
            f"new_rows: row {row} has sampling.{parameter.name}={value:g}; {low:g} to {parameter.high:g} is valid"
        )
    for name in ("logprobs", "prompt_logprobs"):
        if (count := getattr(sampling, name)) > MAX_LOGPROBS:
            raise PlanError(f"new_rows: row {row} has sampling.{name}={count}; 0 to {MAX_LOGPROBS} is valid")
    return RowSampling(
        row=row,
        temperature=new.temperature,
        top_k=max(0, sampling.top_k),
        top_p=BY_NAME["top_p"].value_in(sampling),
        min_p=sampling.min_p,
        seed=sampling.seed,
        choice=choice,
        num_logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
        adjustments=adjustments_of(new),
    )
