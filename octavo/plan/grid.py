"""Simulates each setting of a grid, and picks the best."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from configs.groups.speculation import SpeculativeConfig
from configs.options import Options
from octavo.lab.bounds import Bounds
from octavo.lab.errors import DoesNotFit
from octavo.lab.settings import Setting
from octavo.plan.simulate import Run, simulate
from octavo.plan.targets import Target
from octavo.plan.workload import Workload
from scheduler.core.messages import Speculation

# Returns the options with a setting's values.
OptionsOf = Callable[[Setting], Options]
# Throughputs within this share of the most count as equal.
ALIKE = 0.97


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A setting and its run, or the reason why it cannot run."""

    setting: Setting
    run: Run | None = None
    # The numbers of the run, as `octavo.lab.bounds.as_measured`.
    numbers: Mapping[str, Any] = field(default_factory=dict)
    # The limits that the run exceeds, as text for people.
    late: list[str] = field(default_factory=list)
    # Output tokens a second over those of a run without speculation; None: the run has none.
    speculation_ratio: float | None = None
    # The message of DoesNotFit.
    obstacle: str = ""
    # Real seconds that the simulation took.
    wall_time: float = 0.0

    @property
    def out(self) -> str:
        """Why it is ruled out: it does not fit, or exceeds limits. Empty if neither."""
        return self.obstacle or ", ".join(self.late)


def try_setting(
    setting: Setting,
    target: Target,
    options_of: OptionsOf,
    workload: Workload,
    limits: Bounds,
    *,
    acceptance: float | None = None,
) -> Outcome:
    """Simulates the workload. acceptance: the probability that a draft is right; None: without speculation.

    Raises PlanError for errors that no setting avoids, such as a request that can never be served.
    """
    start = time.perf_counter()
    try:
        options = options_of(setting)
        core, cost = target.prepare(setting, options)
    except DoesNotFit as error:
        return Outcome(setting=setting, obstacle=str(error))
    num_replicas = setting.layout[2]
    plain = simulate(replace(core, speculation=None), cost, workload, num_replicas=num_replicas)
    run, ratio = plain, None
    drafting = core if core.speculation is not None and workload.outputs is not None else None
    if acceptance is not None:
        bound = (options.speculative_config or SpeculativeConfig.model_validate({})).num_speculative_tokens
        drafting = replace(core, speculation=Speculation(num_speculative_tokens=bound, workers_draft=True))
    if drafting is not None:
        run = simulate(drafting, cost, workload, num_replicas=num_replicas, acceptance=acceptance or 0.0)
        ratio = run.output_tokens_per_second / plain.output_tokens_per_second
    numbers = run.measured()
    return Outcome(
        setting=setting,
        run=run,
        numbers=numbers,
        late=limits.late(numbers),
        speculation_ratio=ratio,
        wall_time=time.perf_counter() - start,
    )


def best_of(outcomes: Iterable[Outcome]) -> Outcome | None:
    """The outcome with the most output tokens/s within the limits; None if there is none.

    Outcomes within 3% of the most count as equal (a light workload gives all settings the same throughput); among
    them, the one whose requests take the least time wins.
    """
    within = [(outcome, outcome.run) for outcome in outcomes if outcome.run and not outcome.late]
    most = max((run.output_tokens_per_second for _, run in within), default=0.0)
    near = [(float(run.e2e.mean()), outcome) for outcome, run in within if run.output_tokens_per_second >= ALIKE * most]
    return min(near, key=lambda pair: pair[0])[1] if near else None
