"""`octavo plan`."""

from typing import Any

import typer

from configs.groups.field import CACHE, SCHEDULING
from configs.options import Options
from octavo.cli.flags import CONFIG_FLAG, SNAKE_CASE_FLAGS, given_options, plan_packages, with_option_flags
from octavo.lab.flags import with_flags
from octavo.plan.flags import OPTION_AXES, PlanFlags

_OPTION_FLAGS = {
    name
    for name, info in Options.model_fields.items()
    if isinstance(info.json_schema_extra, dict)
    and (info.json_schema_extra["group"] in (SCHEDULING, CACHE) or name == "max_model_len")
    and name not in OPTION_AXES
}
_NOTHING_WITHIN_LIMITS = 1


def register(app: typer.Typer, group: str) -> None:
    app.command(name="plan", rich_help_panel=group, context_settings=SNAKE_CASE_FLAGS)(
        with_option_flags(with_flags(plan), _OPTION_FLAGS)
    )


def plan(*, config: CONFIG_FLAG = None, query: PlanFlags, **flags: Any) -> None:
    """Predict throughput and latency of settings without running them.

    Tries one setting, or finds the best of many. The real scheduling core plans every step of the workload; a cost
    model says how long each step takes. The cost model is fitted to measured steps (--fit), or made from a GPU's data
    sheet and a model's config.json (--gpu).

    Example: [bold]octavo bench throughput --json > steps.jsonl[/], then
    [bold]octavo plan --fit steps.jsonl --concurrency 32 --max-num-batched-tokens 128,512,2048[/]

    Example: [bold]octavo plan --trace run.0.trace --max-num-seqs 16,64,256[/], what if a recorded day had had other
    settings

    Example: [bold]octavo plan --gpu H200 --num-gpus 8 --model config.json --max-itl-ms 50[/]
    """
    with plan_packages("octavo plan"):
        from octavo.plan.query import answer, answer_for_device

    given = given_options(config, flags)
    if query.device:
        answer_for_device(query, given)
    elif not answer(query, given):
        raise typer.Exit(_NOTHING_WITHIN_LIMITS)
