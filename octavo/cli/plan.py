"""`octavo plan`."""

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from configs.groups.field import CACHE, SCHEDULING
from configs.load import ConfigError
from configs.options import Options
from octavo.cli.flags import CONFIG_FLAG, SNAKE_CASE_FLAGS, with_option_flags

# Flags of their own here, for they take lists.
_LISTS = {"max_num_seqs", "max_num_batched_tokens", "data_parallel_size"}
_OPTION_FLAGS = {
    name
    for name, info in Options.model_fields.items()
    if isinstance(info.json_schema_extra, dict)
    and (info.json_schema_extra["group"] in (SCHEDULING, CACHE) or name == "max_model_len")
    and name not in _LISTS
}
_NOTHING_WITHIN_LIMITS = 1
_COSTS, _WORKLOAD, _GRID, _OUTPUT = "Costs: measured, or of GPUs", "Workload", "Grid: one number, or N,N,...", "Output"


def _list_flag(help: str) -> Any:
    return typer.Option(metavar="N,N,...", help=help, rich_help_panel=_GRID)


def register(app: typer.Typer) -> None:
    app.command(name="plan", context_settings=SNAKE_CASE_FLAGS)(with_option_flags(plan, _OPTION_FLAGS))


def plan(
    config: CONFIG_FLAG = None,
    fit: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=_COSTS,
            help="What `octavo bench throughput --json` printed on the machine in question: its steps are the costs. "
            "Lines of `octavo bench serve --json` say what a cluster adds. May be given several times.",
        ),
    ] = None,
    gpu: Annotated[
        str,
        typer.Option(
            metavar="NAME", rich_help_panel=_COSTS, help="A GPU, such as H200, whose data sheet is the costs."
        ),
    ] = "",
    model: Annotated[
        str,
        typer.Option(
            metavar="CONFIG",
            rich_help_panel=_COSTS,
            help="With --gpu: a config.json, a directory with one, a .gguf file, package:NAME or a hub name. "
            "Default: the option `model`.",
        ),
    ] = "",
    num_gpus: Annotated[
        int,
        typer.Option(
            min=0, rich_help_panel=_COSTS, help="With --gpu: try every TP x PP x DP on so many, and recommend one."
        ),
    ] = 0,
    interconnect: Annotated[
        str,
        typer.Option(
            metavar="KIND[,KIND]",
            rich_help_panel=_COSTS,
            help="nvlink, pcie or net:GBIT between GPUs; two: within hosts and between them. "
            "Default: the GPU's fastest.",
        ),
    ] = "",
    gpus_per_node: Annotated[int, typer.Option(min=1, rich_help_panel=_COSTS, help="GPUs of one host.")] = 8,
    gpu_memory_utilization: Annotated[
        float, typer.Option(rich_help_panel=_COSTS, help="Share of a GPU's memory that is used.")
    ] = 0.9,
    quantization: Annotated[
        str,
        typer.Option(
            metavar="none|fp8|int8|int4",
            rich_help_panel=_COSTS,
            help="Of the layers' weights: fp8 and int8 in 8 bits, int4 in 4 and what their scales take.",
        ),
    ] = "none",
    kv_cache_dtype: Annotated[
        str, typer.Option(metavar="auto|fp8", rich_help_panel=_COSTS, help="fp8: KV in 8 bits. auto: in 16.")
    ] = "auto",
    num_requests: Annotated[int, typer.Option(min=1, rich_help_panel=_WORKLOAD, help="How many are sent.")] = 1000,
    request_rate: Annotated[
        float,
        typer.Option(
            metavar="R|inf", rich_help_panel=_WORKLOAD, help="A second, arriving at random; inf: all at once."
        ),
    ] = math.inf,
    concurrency: Annotated[
        int, typer.Option(min=0, rich_help_panel=_WORKLOAD, help="Requests under way at most; 0: no bound.")
    ] = 0,
    prompt_len: Annotated[
        str,
        typer.Option(
            metavar="LENGTH", rich_help_panel=_WORKLOAD, help="Tokens: N, uniform:LOW:HIGH or lognormal:MEAN:SIGMA."
        ),
    ] = "128",
    output_len: Annotated[
        str, typer.Option(metavar="LENGTH", rich_help_panel=_WORKLOAD, help="As prompt_len.")
    ] = "128",
    shared_prefix: Annotated[
        float,
        typer.Option(min=0, max=1, rich_help_panel=_WORKLOAD, help="Share of a prompt that others begin with, too."),
    ] = 0.0,
    num_prefixes: Annotated[int, typer.Option(min=1, rich_help_panel=_WORKLOAD, help="Different beginnings.")] = 1,
    arrivals: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.csv",
            rich_help_panel=_WORKLOAD,
            help="Requests from a file instead: arrival_s,prompt_len,output_len[,prefix_id], with this header.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, rich_help_panel=_WORKLOAD, help="Of lengths and arrivals.")] = 0,
    max_num_seqs: Annotated[str, _list_flag("Sequences that run at once in a replica.")] = "",
    max_num_batched_tokens: Annotated[str, _list_flag("Token budget of a step.")] = "",
    data_parallel_size: Annotated[str, _list_flag("Replicas; each request goes to the least loaded.")] = "",
    tensor_parallel_size: Annotated[str, _list_flag("With --gpu: GPUs that share each layer.")] = "",
    pipeline_parallel_size: Annotated[str, _list_flag("With --gpu: stages, each with a part of the layers.")] = "",
    max_itl_ms: Annotated[
        float | None, typer.Option(min=0, rich_help_panel=_OUTPUT, help="What the 99th percentile of ITL may be.")
    ] = None,
    max_ttft_ms: Annotated[
        float | None, typer.Option(min=0, rich_help_panel=_OUTPUT, help="What the 99th percentile of TTFT may be.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", rich_help_panel=_OUTPUT, help="Also draw the outcomes.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", rich_help_panel=_OUTPUT, help="One JSON object a line, for programs.")
    ] = False,
    **flags: Any,
) -> None:
    """Predict throughput and latencies of a setting, or find the best of many, without running anything.

    The real scheduling core plans every step of the workload; a model of costs says how long each takes. It is fitted
    to measured steps (--fit), or made from a GPU's data sheet and a model's config.json (--gpu).

    Example: [bold]octavo bench throughput --json > steps.jsonl[/], then
    [bold]octavo plan --fit steps.jsonl --concurrency 32 --max-num-batched-tokens 128,512,2048[/]

    Example: [bold]octavo plan --gpu H200 --num-gpus 8 --model config.json --max-itl-ms 50[/]
    """
    try:
        from octavo.plan.query import GpuQuery, Query, WorkloadQuery, answer
    except ModuleNotFoundError as error:
        raise ConfigError(f"octavo plan needs the package {error.name}: pip install 'octavo[plan]'") from None

    query = Query(
        config=config,
        option_flags={name: value for name, value in flags.items() if value is not None},
        axes={
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "tensor_parallel_size": tensor_parallel_size,
            "pipeline_parallel_size": pipeline_parallel_size,
            "data_parallel_size": data_parallel_size,
        },
        fit=fit or [],
        gpu=GpuQuery(
            name=gpu,
            model=model,
            num_gpus=num_gpus,
            interconnect=interconnect,
            gpus_per_node=gpus_per_node,
            gpu_memory_utilization=gpu_memory_utilization,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
        ),
        workload=WorkloadQuery(
            num_requests=num_requests,
            request_rate=request_rate,
            concurrency=concurrency,
            prompt_len=prompt_len,
            output_len=output_len,
            shared_prefix=shared_prefix,
            num_prefixes=num_prefixes,
            arrivals=arrivals,
            seed=seed,
        ),
        max_itl_ms=max_itl_ms,
        max_ttft_ms=max_ttft_ms,
    )
    if not answer(query, plot=plot, as_json=as_json):
        raise typer.Exit(_NOTHING_WITHIN_LIMITS)
