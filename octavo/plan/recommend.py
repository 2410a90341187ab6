"""Recommends a TP x PP x DP layout for a number of GPUs, with reasons."""

from collections.abc import Mapping, Sequence

from rich.console import Console

from octavo.lab.errors import PlanError
from octavo.lab.settings import LAYOUT, Setting
from octavo.plan.costs.model_shape import ModelShape
from octavo.plan.grid import ALIKE, Outcome
from octavo.plan.machine.advice import GpuAdvice
from octavo.plan.report import largest_parts

_IDLE = "waiting for work, or for other stages"


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


def name_of(setting: Setting) -> str:
    tensor, stages, replicas = setting.layout
    return f"TP {tensor} x PP {stages} x DP {replicas}"


def reasons_of(outcomes: Sequence[Outcome], best: Outcome | None) -> dict[Setting, str]:
    """The reason for `best`, the result of `grid.best_of`, and against each other setting."""
    reasons = {}
    for outcome in outcomes:
        if outcome is best:
            reasons[outcome.setting] = _why(outcome, outcomes)
        else:
            reasons[outcome.setting] = outcome.out if best is None or outcome.out else _why_not(outcome, best)
    return reasons


def print_recommendation(best: Outcome | None, reasons: Mapping[Setting, str]) -> None:
    """Prints the layout, the reason for it, and the reason against each other layout."""
    console = Console(highlight=False)
    if best:
        console.print(f"Recommended: {name_of(best.setting)}", style="bold green")
        console.print(reasons[best.setting])
        sizes = zip(LAYOUT, best.setting.layout, strict=True)
        console.print(" ".join(f"--{name.replace('_', '-')} {size}" for name, size in sizes), style="dim")
    else:
        console.print("Nothing to recommend: no layout fits and keeps the limits", style="bold yellow")
    for setting, why in reasons.items():
        if best is None or setting != best.setting:
            console.print(f"not {name_of(setting)}: {why}", style="dim")


def print_advice(advice: GpuAdvice, *, num_rows: int) -> None:
    """Prints what tensor and pipeline parallelism give, which to take, and why."""
    console = Console(highlight=False)
    console.print(f"One replica on all GPUs, {num_rows} sequences that decode:")
    for split in advice.splits:
        console.print(f"  {split}")
    console.print(f"take {advice.take}: {advice.reason}", style="bold")


def _why(best: Outcome, outcomes: Sequence[Outcome]) -> str:
    """Names the bottleneck: memory, a limit, or a part of the step."""
    assert best.run is not None
    reasons = []
    ranks = best.setting.num_ranks
    others = [outcome for outcome in outcomes if outcome is not best]
    smaller = [outcome for outcome in others if outcome.setting.num_ranks < ranks]
    if smaller and all(outcome.run is None for outcome in smaller):
        reasons.append(f"memory binds: fewer than {ranks} GPUs per replica cannot hold the weights and the KV cache")
    elif late := [text for outcome in smaller for text in outcome.late]:
        reasons.append(f"the latency target binds: with fewer GPUs per replica, {late[0]}")
    elif ranks == 1 and any(outcome.run for outcome in others):
        reasons.append("the model fits on one GPU, so no GPU waits for another")
    elif smaller:
        other = max(smaller, key=lambda outcome: outcome.numbers.get("output_tok_s", 0.0))
        spends = f"{name_of(other.setting)} spends more on {_largest_excess(other, best)}"
        reasons.append(f"{ranks} GPUs per replica beat fewer: {spends}")
    reasons.append(f"steps are bound by {largest_parts(best.run, 2)}")
    if best.run.num_preemptions:
        reasons.append(f"{best.run.num_preemptions:,} preemptions: KV memory is still short")
    return "; ".join(reasons)


def _why_not(outcome: Outcome, best: Outcome) -> str:
    run, best_run = outcome.run, best.run
    assert run is not None
    assert best_run is not None
    ratio = run.output_tokens_per_second / best_run.output_tokens_per_second
    change = f"{1 - ratio:.0%} fewer output tokens/s"
    if ratio > ALIKE:
        times = run.e2e.mean() / best_run.e2e.mean()
        change = f"about the same output tokens/s, but {times:.2f} x the time for a request"
    return f"{change}; it spends more on {_largest_excess(outcome, best)}"


def _largest_excess(outcome: Outcome, best: Outcome) -> str:
    """The part with the largest excess of GPU time per token over that of `best`, as text for people."""
    ours, theirs = _gpu_seconds(outcome), _gpu_seconds(best)
    part = max(ours, key=lambda name: ours[name] - theirs[name])
    return f"{part} ({ours[part] * 1e6:,.3g} us of GPU time per output token, not {theirs[part] * 1e6:,.3g})"


def _gpu_seconds(outcome: Outcome) -> dict[str, float]:
    """GPU seconds per output token by part, over all GPUs. Times the tokens, they add up to GPUs times duration."""
    run, setting = outcome.run, outcome.setting
    assert run is not None
    seconds = {part: spent * setting.num_ranks for part, spent in run.part_seconds.items()}
    seconds[_IDLE] = max(0.0, run.idle) * run.duration * setting.num_gpus
    return {part: spent / run.num_output_tokens for part, spent in seconds.items()}
