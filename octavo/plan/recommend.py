"""Recommends a TP x PP x DP layout for a number of GPUs, with reasons."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console

from octavo.plan.costs.model_shape import ModelShape
from octavo.plan.errors import PlanError
from octavo.plan.grid import Limits, Outcome, violations
from octavo.plan.machine.advice import GpuAdvice
from octavo.plan.report import largest_parts
from octavo.plan.simulate import Run
from octavo.plan.targets import Setting

_IDLE = "waiting for work, or for other stages"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The recommended layout, or None in `best` if no layout fits and keeps the limits."""

    best: Outcome | None
    # Why the best one is the best.
    reason: str
    # Every other setting, with the reason against it.
    rejected: Sequence[tuple[Setting, str]]

    @property
    def reasons(self) -> dict[Setting, str]:
        """The reason for or against each setting."""
        chosen = {self.best.setting: self.reason} if self.best else {}
        return chosen | dict(self.rejected)


def layouts(num_gpus: int, model: ModelShape) -> list[tuple[int, int, int]]:
    """All (tensor, pipeline, data) parallel sizes that use all GPUs and divide the model. Raises PlanError."""
    found = []
    for tensor in _divisors(num_gpus):
        if model.divides_among(tensor):
            stages = [count for count in _divisors(num_gpus // tensor) if count <= model.num_layers]
            found += [(tensor, count, num_gpus // tensor // count) for count in stages]
    if not found:
        raise PlanError(f"--num-gpus={num_gpus}: {model.name} cannot be split over them")
    return found


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def recommend(outcomes: Iterable[Outcome], limits: Limits, best: Outcome | None) -> Recommendation:
    """Explains the choice of `best`, the result of `grid.best_of`."""
    outcomes = list(outcomes)
    if best is None:
        return Recommendation(
            best=None,
            reason="no layout fits and keeps the limits",
            rejected=[(outcome.setting, _why_out(outcome, limits)) for outcome in outcomes],
        )
    rejected = [(outcome.setting, _why_not(outcome, best, limits)) for outcome in outcomes if outcome is not best]
    return Recommendation(best=best, reason=_why(best, outcomes, limits), rejected=rejected)


def name_of(setting: Setting) -> str:
    return f"TP {setting.tensor_parallel_size} x PP {setting.pipeline_parallel_size} x DP {setting.data_parallel_size}"


def print_recommendation(recommendation: Recommendation) -> None:
    """Prints the layout, the reason for it, and the reason against each other layout."""
    console = Console()
    best = recommendation.best
    if best:
        setting = best.setting
        console.print(f"Recommended: {name_of(setting)}", style="bold green", highlight=False)
        console.print(recommendation.reason, highlight=False)
        flags = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
        flags_text = " ".join(f"--{flag.replace('_', '-')} {getattr(setting, flag)}" for flag in flags)
        console.print(flags_text, style="dim", highlight=False)
    else:
        console.print(f"Nothing to recommend: {recommendation.reason}", style="bold yellow", highlight=False)
    for setting, why in recommendation.rejected:
        console.print(f"not {name_of(setting)}: {why}", style="dim", highlight=False)


def print_advice(advice: GpuAdvice, *, num_rows: int) -> None:
    """Prints what tensor and pipeline parallelism give, which to take, and why."""
    console = Console()
    console.print(f"One replica on all GPUs, {num_rows} sequences that decode:", highlight=False)
    for split in advice.splits:
        console.print(f"  {split}", highlight=False)
    console.print(f"take {advice.take}: {advice.reason}", style="bold", highlight=False)


def _why(best: Outcome, outcomes: Sequence[Outcome], limits: Limits) -> str:
    """Names the bottleneck: memory, a limit, or a part of the step."""
    run, setting = best.run, best.setting
    assert run is not None
    reasons = []
    ranks = setting.num_gpus // setting.data_parallel_size
    others = [outcome for outcome in outcomes if outcome is not best]
    smaller = [o for o in others if o.setting.num_gpus // o.setting.data_parallel_size < ranks]
    if smaller and all(outcome.run is None for outcome in smaller):
        reasons.append(f"memory binds: fewer than {ranks} GPUs per replica cannot hold the weights and the KV cache")
    elif smaller and any(outcome.run and violations(outcome.run, limits) for outcome in smaller):
        late = next(v for o in smaller if o.run for v in violations(o.run, limits))
        reasons.append(f"the latency target binds: with fewer GPUs per replica, {late}")
    elif ranks == 1 and any(outcome.run for outcome in others):
        reasons.append("the model fits on one GPU, so no GPU waits for another")
    elif smaller:
        reasons.append(f"{ranks} GPUs per replica beat fewer: {_compare(run, setting, _first_run(smaller))}")
    reasons.append(f"steps are bound by {largest_parts(run, 2)}")
    if run.num_preemptions:
        reasons.append(f"{run.num_preemptions:,} preemptions: KV memory is still short")
    return "; ".join(reasons)


def _first_run(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome with the most throughput among those that ran."""
    ran = [(outcome.run.output_tokens_per_second, outcome) for outcome in outcomes if outcome.run]
    return max(ran, key=lambda pair: pair[0])[1]


def _compare(run: Run, setting: Setting, other: Outcome) -> str:
    assert other.run is not None
    part = _largest_excess(other.run, other.setting, run, setting)
    return f"{name_of(other.setting)} spends more on {part}"


def _why_out(outcome: Outcome, limits: Limits) -> str:
    """Why an outcome is ruled out: it does not fit, or exceeds limits. Empty if neither."""
    if outcome.run is None:
        return outcome.obstacle
    return ", ".join(violations(outcome.run, limits))


def _why_not(outcome: Outcome, best: Outcome, limits: Limits) -> str:
    if out := _why_out(outcome, limits):
        return out
    run, best_run = outcome.run, best.run
    assert run is not None
    assert best_run is not None
    ratio = run.output_tokens_per_second / best_run.output_tokens_per_second
    if ratio > 0.97:
        change = (
            f"about the same output tokens/s, but {run.e2e.mean() / best_run.e2e.mean():.2f} x the time for a request"
        )
    else:
        change = f"{1 - ratio:.0%} fewer output tokens/s"
    return f"{change}; it spends more on {_largest_excess(run, outcome.setting, best_run, best.setting)}"


def _largest_excess(run: Run, setting: Setting, best_run: Run, best: Setting) -> str:
    """The part with the largest excess of GPU time per token over `best_run`, as text for people."""
    ours, theirs = _gpu_seconds(run, setting), _gpu_seconds(best_run, best)
    part = max(ours, key=lambda name: ours[name] - theirs[name])
    return f"{part} ({ours[part] * 1e6:,.3g} us of GPU time per output token, not {theirs[part] * 1e6:,.3g})"


def _gpu_seconds(run: Run, setting: Setting) -> dict[str, float]:
    """GPU seconds per output token by part, over all GPUs. Times the tokens, they add up to GPUs times duration."""
    ranks = setting.num_gpus // setting.data_parallel_size
    seconds = {part: spent * ranks for part, spent in run.part_seconds.items()}
    seconds[_IDLE] = max(0.0, run.idle) * run.duration * setting.num_gpus
    return {part: spent / run.num_output_tokens for part, spent in seconds.items()}
