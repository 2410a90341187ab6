"""`octavo tune`."""

import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from configs.load import ConfigError
from configs.options import Options
from octavo.cli.bench.flags import JSON
from octavo.cli.bench.load_flags import LoadFlags, with_load_flags
from octavo.cli.flags import CONFIG_FLAG, SNAKE_CASE_FLAGS, with_option_flags

_NOTHING_WITHIN_BOUNDS = 1
# As octavo.tune.space.AXES, which imports more than `--help` may: these take lists here.
_AXES = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "speculative_config",
    "block_size",
    "max_steps_in_flight",
    "worker_threads",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "quantization",
)
# Each cluster has its own.
_OWN = ("port", "http_port", "metrics_port", "runtime_dir", "trace")
_OPTION_FLAGS = [name for name in Options.model_fields if name not in (*_AXES, *_OWN)]
_GRID, _REQUESTS, _BOUNDS, _EFFORT = "Settings to try", "What is sent", "What must hold", "Effort"


def _axis(help: str) -> Any:
    return typer.Option(metavar="V,V,...", help=help, rich_help_panel=_GRID)


def _limit(help: str) -> Any:
    return typer.Option(min=0, metavar="MS", help=help, rich_help_panel=_BOUNDS)


def register(app: typer.Typer, group: str) -> None:
    app.command(name="tune", rich_help_panel=group, context_settings=SNAKE_CASE_FLAGS)(
        with_option_flags(with_load_flags(tune), _OPTION_FLAGS)
    )


def tune(
    load: LoadFlags,
    config: CONFIG_FLAG = None,
    max_num_seqs: Annotated[str, _axis("Rows. Default: a quarter, half, once and twice the option's value.")] = "",
    max_num_batched_tokens: Annotated[str, _axis("Budgets of a step. Default: as for --max-num-seqs.")] = "",
    speculation: Annotated[str, _axis("Methods of speculative_config, and off: off,suffix,ngram.")] = "",
    block_size: Annotated[str, _axis("Tokens of a KV block.")] = "",
    max_steps_in_flight: Annotated[str, _axis("Steps in flight.")] = "",
    worker_threads: Annotated[str, _axis("Threads of a worker.")] = "",
    tensor_parallel_size: Annotated[str, _axis("Ranks that share each layer.")] = "",
    pipeline_parallel_size: Annotated[str, _axis("Stages.")] = "",
    data_parallel_size: Annotated[str, _axis("Replicas.")] = "",
    quantization: Annotated[str, _axis("Quantization of the weights: none,int8,int4.")] = "",
    num_requests: Annotated[
        int, typer.Option(min=2, rich_help_panel=_REQUESTS, help="Requests of a whole measurement.")
    ] = 100,
    min_prefix_hit_rate: Annotated[
        float,
        typer.Option(
            min=0,
            max=0.99,
            rich_help_panel=_REQUESTS,
            help="Prompts share a beginning, so that the prefix cache should have this share of their tokens; settings "
            "that stay below it are rejected.",
        ),
    ] = 0.0,
    max_ttft_ms: Annotated[float | None, _limit("Limit of the 99th percentile of the time to the first token.")] = None,
    max_itl_ms: Annotated[float | None, _limit("Limit of the 99th percentile of the time between tokens.")] = None,
    max_e2e_ms: Annotated[float | None, _limit("Limit of the 99th percentile of the whole request's time.")] = None,
    margin: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            rich_help_panel=_EFFORT,
            help="Settings that are predicted to be worse than the best by more than this share are skipped.",
        ),
    ] = 0.15,
    max_measured: Annotated[
        int, typer.Option(min=1, rich_help_panel=_EFFORT, help="Most settings that are measured on a cluster.")
    ] = 4,
    rounds: Annotated[
        int, typer.Option(min=1, rich_help_panel=_EFFORT, help="Measurements of each finalist, in turns.")
    ] = 3,
    exhaustive: Annotated[
        bool,
        typer.Option("--exhaustive", rich_help_panel=_EFFORT, help="Measure the whole grid, whatever is predicted."),
    ] = False,
    profile: Annotated[
        bool, typer.Option(rich_help_panel=_EFFORT, help="Record the best setting's steps with torch.profiler.")
    ] = True,
    output: Annotated[Path, typer.Option(metavar="DIR", help="Where state, traces, logs and the report go.")] = Path(
        "octavo-tune"
    ),
    restart: Annotated[bool, typer.Option("--restart", help="Forget what an earlier run has measured.")] = False,
    as_json: JSON = False,
    **flags: Any,
) -> None:
    """Find the options with the most throughput within a latency bound.

    Starts clusters on this machine. First the most memory that works; then a few probes, from whose recorded steps all
    settings are predicted by the scheduler's own core; then the settings that can still win are measured, each at the
    highest request rate that keeps the bounds; the best two in turns. Ctrl-C ends it at any time: the same command goes
    on where it stopped. The report, a page with plots and the YAML to use are in --output. Options of the cluster are
    flags as for `octavo up`.

    Example: [bold]octavo tune -c configs/local.yaml --prompt-len 512 --output-len 128 --max-itl-ms 200[/]

    Example: [bold]octavo tune --max-num-seqs 16,64 --worker-threads 1,2 --speculation off,suffix --max-e2e-ms 5000[/]
    """
    try:
        from octavo.tune import query as tuning
        from octavo.tune.bounds import Bounds
        from octavo.tune.progress import command_line
        from octavo.tune.search.tuner import Effort
    except ModuleNotFoundError as error:
        raise ConfigError(f"octavo tune needs the package {error.name}: pip install 'octavo[plan]'") from None

    query = tuning.Query(
        config=config,
        option_flags={name: value for name, value in flags.items() if value is not None},
        axes={
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "speculative_config": speculation,
            "block_size": block_size,
            "max_steps_in_flight": max_steps_in_flight,
            "worker_threads": worker_threads,
            "tensor_parallel_size": tensor_parallel_size,
            "pipeline_parallel_size": pipeline_parallel_size,
            "data_parallel_size": data_parallel_size,
            "quantization": quantization,
        },
        dataset=load.query(),
        min_prefix_hit_rate=min_prefix_hit_rate,
        num_requests=num_requests,
        burstiness=load.burstiness,
        seed=load.seed,
        bounds=Bounds(
            ttft_ms=max_ttft_ms or math.inf,
            itl_ms=max_itl_ms or math.inf,
            e2e_ms=max_e2e_ms or math.inf,
            min_hit_rate=min_prefix_hit_rate,
        ),
        effort=Effort(margin=margin, max_measured=max_measured, rounds=rounds, is_exhaustive=exhaustive),
        output=output,
        restarts=restart,
        profiles=profile,
        command=command_line(sys.argv[1:]),
    )
    try:
        kept = tuning.tune(query, as_json=as_json)
    except KeyboardInterrupt:
        typer.echo(f"what was measured is kept in {output}; the same command goes on from there", err=True)
        raise
    if not kept:
        typer.echo("no setting keeps the bounds; the report says how far off they are", err=True)
        raise typer.Exit(_NOTHING_WITHIN_BOUNDS)
