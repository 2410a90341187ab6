"""The output of a plan: one JSON object per line for programs, a table for people."""

from collections.abc import Iterable, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from octavo.lab.settings import AXES, SHORT, Setting
from octavo.plan.grid import Outcome
from octavo.plan.simulate import Run
from octavo.reports import print_json


def axes_that_differ(outcomes: Iterable[Outcome]) -> list[str]:
    """The axes on which the settings differ."""
    values: dict[str, set[object]] = {}
    for outcome in outcomes:
        for name, value in outcome.setting.values:
            values.setdefault(name, set()).add(value)
    return [name for name in AXES if len(values.get(name, ())) > 1]


def as_json(outcome: Outcome, *, is_best: bool) -> dict[str, object]:
    """An outcome as JSON. Keys: those of the setting, best, and either does_not_fit or those of a run.

    Keys of a run as in `octavo bench`: num_requests, duration_s, requests_s, output_tok_s, total_tok_s; ttft_s, itl_ms
    and e2e_s, each as a mean and with _p50, _p90, _p99; num_steps, step_ms. More keys: num_refused, num_preemptions,
    prefix_hit_rate, kv_usage_mean, kv_usage_peak, idle, step_parts (share of the stages' busy time by part),
    violations, and simulated_in_s (real seconds). With speculation also draft_tokens, accepted_draft_tokens,
    tokens_per_step (output tokens) and speculation_ratio (of output_tok_s, to the same without).
    """
    values: dict[str, object] = {**dict(outcome.setting.values), "best": is_best}
    run = outcome.run
    if run is None:
        return values | {"does_not_fit": outcome.obstacle}
    values |= run.as_json() | {"num_refused": run.num_refused}
    if outcome.speculation_ratio is not None:
        values |= {
            "draft_tokens": run.num_draft_tokens,
            "accepted_draft_tokens": run.num_accepted_tokens,
            "tokens_per_step": round(run.num_output_tokens / run.num_steps, 3),
            "speculation_ratio": round(outcome.speculation_ratio, 3),
        }
    return values | {
        "num_steps": run.num_steps,
        "step_ms": round(_busy(run) / run.num_steps * 1e3, 4) if run.num_steps else 0.0,
        "num_preemptions": run.num_preemptions,
        "kv_usage_mean": round(run.kv_usage_mean, 4),
        "kv_usage_peak": round(run.kv_usage_peak, 4),
        "idle": round(max(0.0, run.idle), 4),
        "step_parts": {part: round(share, 4) for part, share in step_split(run).items()},
        "violations": outcome.late,
        "simulated_in_s": round(outcome.wall_time, 3),
    }


def step_split(run: Run) -> dict[str, float]:
    """Each part's share of the time of all steps, without parts that took no time."""
    busy = _busy(run)
    return {part: seconds / busy for part, seconds in run.part_seconds.items() if seconds} if busy else {}


def _busy(run: Run) -> float:
    return sum(run.part_seconds.values())


def print_lines(
    outcomes: Sequence[Outcome], best: Outcome | None, reasons: Mapping[Setting, str] | None = None
) -> None:
    """Prints JSON lines. reasons: for or against each setting, printed under the key `reason`."""
    for outcome in outcomes:
        values = as_json(outcome, is_best=outcome is best)
        if reasons is not None:
            values["reason"] = reasons[outcome.setting]
        print_json(values)


def print_table(outcomes: Sequence[Outcome], best: Outcome | None, *, title: str, with_obstacles: bool = True) -> None:
    """Prints one setting in full, or several with a row each and the best marked. with_obstacles: print why some do not
    fit."""
    console = Console(highlight=False)
    console.print(title, style="bold")
    if len(outcomes) == 1 and (run := outcomes[0].run):
        console.print(_details(as_json(outcomes[0], is_best=True), run))
    else:
        console.print(_rows(outcomes, best))
        notes = "TTFT in s and ITL in ms: p50 / p99. step: the largest part of its time. * the best, ! over a limit"
        console.print(notes, style="dim")
    for outcome in outcomes:
        if outcome.obstacle and with_obstacles:
            console.print(outcome.obstacle, style="yellow")
    ran = [(outcome, outcome.run) for outcome in outcomes if outcome.run]
    if ran:
        requests = sum(run.num_requests + run.num_refused for _, run in ran)
        steps, seconds = sum(run.num_steps for _, run in ran), sum(outcome.wall_time for outcome, _ in ran)
        console.print(f"simulated {requests:,} requests in {steps:,} steps: {seconds:.2f} s")


def _details(values: dict[str, object], run: Run) -> Table:
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    hidden = {"best", "step_parts", "violations", "simulated_in_s"}
    for key, value in values.items():
        if key not in hidden:
            table.add_row(key, f"{value:,.5g}" if isinstance(value, float) else f"{value:,}")
    table.add_section()
    for part, share in step_split(run).items():
        table.add_row(f"step time: {part}", f"{share:.1%}")
    for text in values["violations"]:  # type: ignore[union-attr]
        table.add_row("exceeds a limit", text, style="yellow")
    return table


def _rows(outcomes: Sequence[Outcome], best: Outcome | None) -> Table:
    axes = axes_that_differ(outcomes)
    table = Table(padding=(0, 0), box=SIMPLE_HEAD)
    for heading in (*(SHORT[axis] for axis in axes), "tok/s", "TTFT", "ITL", "preempted", "KV peak"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("step")
    table.add_column("")
    for outcome in outcomes:
        cells = [f"{outcome.setting.value(axis):,}" for axis in axes]
        run, numbers = outcome.run, outcome.numbers
        if run is None:
            table.add_row(*cells, *("-",) * 5, "does not fit", "", style="dim")
            continue
        table.add_row(
            *cells,
            f"{run.output_tokens_per_second:,.5g}",
            f"{numbers['ttft_ms_p50'] / 1e3:,.3g} / {numbers['ttft_ms_p99'] / 1e3:,.3g}",
            f"{numbers['itl_ms_p50']:,.3g} / {numbers['itl_ms_p99']:,.3g}",
            f"{run.num_preemptions:,}",
            f"{run.kv_usage_peak:.0%}",
            largest_parts(run, 1),
            "*" if outcome is best else "!" if outcome.late else "",
            style="bold" if outcome is best else "dim" if outcome.late else None,
        )
    return table


def largest_parts(run: Run, count: int) -> str:
    """The `count` largest parts of a step's time, as text for people."""
    parts = sorted(step_split(run).items(), key=lambda item: -item[1])[:count]
    return ", ".join(f"{part} {share:.0%}" for part, share in parts)
