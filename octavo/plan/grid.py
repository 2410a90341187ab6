"""Makes the grid of settings, simulates each, and picks the best."""

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from configs.groups.speculation import SpeculativeConfig
from configs.options import Options
from octavo.plan.errors import DoesNotFit, PlanError
from octavo.plan.simulate import Run, simulate
from octavo.plan.targets import Setting, Target
from octavo.plan.workload import Workload
from scheduler.core.messages import Speculation

# Returns the options with a setting's values.
OptionsOf = Callable[[Setting], Options]
AXES = tuple(field.name for field in fields(Setting))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of 99th percentiles, in milliseconds; None: no limit."""

    itl_ms: float | None = None
    ttft_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A setting and its run, or the reason why it cannot run."""

    setting: Setting
    run: Run | None = None
    # Output tokens a second over those of a run without speculation; None: the run has none.
    speculation_ratio: float | None = None
    # The message of DoesNotFit.
    obstacle: str = ""
    # Real seconds that the simulation took.
    wall_time: float = 0.0


def parse_axis(text: str, name: str) -> tuple[int, ...]:
    """Parses a list such as 64,128,256. Raises PlanError."""
    try:
        values = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        values = ()
    if not values or min(values) < 1:
        raise PlanError(f"{name}={text!r} is not a list of numbers above 0, such as 64,128,256")
    return values


def settings_of(axes: Mapping[str, Sequence[int]]) -> list[Setting]:
    """Every combination of the values of AXES."""
    return [Setting(**dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]


def try_settings(
    settings: Iterable[Setting],
    target: Target,
    options_of: OptionsOf,
    workload: Workload,
    on_done: Callable[[int], None] = lambda count: None,
    *,
    acceptance: float | None = None,
) -> list[Outcome]:
    """Simulates the workload with each setting. on_done is called with 1 after each. acceptance: the probability
    that a draft is right; None: without speculation.

    Raises PlanError for errors that no setting avoids, such as a request that can never be served.
    """
    outcomes = []
    for setting in settings:
        outcomes.append(_try(setting, target, options_of, workload, acceptance))
        on_done(1)
    return outcomes


def _try(
    setting: Setting, target: Target, options_of: OptionsOf, workload: Workload, acceptance: float | None
) -> Outcome:
    start = time.perf_counter()
    try:
        options = options_of(setting)
        core, cost = target.prepare(setting, options)
    except DoesNotFit as error:
        return Outcome(setting=setting, obstacle=str(error))
    num_replicas = setting.data_parallel_size
    plain = simulate(replace(core, speculation=None), cost, workload, num_replicas=num_replicas)
    run, ratio = plain, None
    drafting = core if core.speculation is not None and workload.outputs is not None else None
    if acceptance is not None:
        bound = (options.speculative_config or SpeculativeConfig.model_validate({})).num_speculative_tokens
        drafting = replace(core, speculation=Speculation(num_speculative_tokens=bound, workers_draft=True))
    if drafting is not None:
        run = simulate(drafting, cost, workload, num_replicas=num_replicas, acceptance=acceptance or 0.0)
        ratio = run.output_tokens_per_second / plain.output_tokens_per_second
    return Outcome(setting=setting, run=run, speculation_ratio=ratio, wall_time=time.perf_counter() - start)


def violations(run: Run, limits: Limits) -> list[str]:
    """The limits that the run exceeds, as text for people."""
    found = []
    for name, seconds, limit in (("ITL", run.gaps, limits.itl_ms), ("TTFT", run.ttft, limits.ttft_ms)):
        if limit is not None and (value := run.percentile_ms(seconds)) > limit:
            found.append(f"{name} p99 {value:,.4g} ms is above {limit:,.4g}")
    return found


def best_of(outcomes: Iterable[Outcome], limits: Limits) -> Outcome | None:
    """The outcome with the most output tokens/s within the limits; None if there is none.

    Outcomes within 3% of the most count as equal (a light workload gives all settings the same throughput); among
    them, the one whose requests take the least time wins.
    """
    within = [(outcome, outcome.run) for outcome in outcomes if outcome.run and not violations(outcome.run, limits)]
    most = max((run.output_tokens_per_second for _, run in within), default=0.0)
    near = [(float(run.e2e.mean()), outcome) for outcome, run in within if run.output_tokens_per_second >= 0.97 * most]
    return min(near, key=lambda pair: pair[0])[1] if near else None
