"""`octavo plan`."""

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from configs.groups.field import CACHE, SCHEDULING
from configs.load import ConfigError
from configs.options import Options
from octavo.cli.flags import CONFIG_FLAG, LENGTHS, SNAKE_CASE_FLAGS, with_option_flags

# These take lists here, so they have their own flags.
_LISTS = {"max_num_seqs", "max_num_batched_tokens", "data_parallel_size"}
_OPTION_FLAGS = {
    name
    for name, info in Options.model_fields.items()
    if isinstance(info.json_schema_extra, dict)
    and (info.json_schema_extra["group"] in (SCHEDULING, CACHE) or name == "max_model_len")
    and name not in _LISTS
}
_NOTHING_WITHIN_LIMITS = 1
_COSTS, _WORKLOAD, _GRID, _OUTPUT = (
    "Costs: from measurements (--fit) or a GPU's data sheet (--gpu)",
    "Workload",
    "Settings to try: N or N,N,...",
    "Output",
)


def _list_flag(help: str) -> Any:
    return typer.Option(metavar="N,N,...", help=help, rich_help_panel=_GRID)


def register(app: typer.Typer, group: str) -> None:
    app.command(name="plan", rich_help_panel=group, context_settings=SNAKE_CASE_FLAGS)(
        with_option_flags(plan, _OPTION_FLAGS)
    )


def plan(
    config: CONFIG_FLAG = None,
    fit: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=_COSTS,
            help="Output of `octavo bench throughput --json` from the machine in question: its steps give the costs. "
            "Output of `octavo bench serve --json` adds the costs of a cluster. May be given several times.",
        ),
    ] = None,
    gpu: Annotated[
        str,
        typer.Option(
            metavar="NAME|auto",
            rich_help_panel=_COSTS,
            help="A GPU, such as H200, whose data sheet gives the costs. auto: this machine's GPUs and their links.",
        ),
    ] = "",
    device: Annotated[
        Literal["", "cpu", "tpu"],
        typer.Option(
            metavar="cpu|tpu",
            rich_help_panel=_COSTS,
            help="Plan no load. cpu: divide the model over this machine's sockets and NUMA nodes. tpu: the page size.",
        ),
    ] = "",
    model: Annotated[
        str,
        typer.Option(
            metavar="CONFIG",
            rich_help_panel=_COSTS,
            help="With --gpu or --device: a config.json, a directory with one, a .gguf file, package:NAME or a hub "
            "name. Default: the option `model`.",
        ),
    ] = "",
    num_gpus: Annotated[
        int,
        typer.Option(
            min=0,
            rich_help_panel=_COSTS,
            help="With --gpu: try every TP x PP x DP on this many GPUs, and recommend one.",
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
    gpus_per_node: Annotated[int, typer.Option(min=1, rich_help_panel=_COSTS, help="GPUs in one host.")] = 8,
    gpu_memory_utilization: Annotated[
        float, typer.Option(rich_help_panel=_COSTS, help="Fraction of a GPU's memory to use.")
    ] = 0.9,
    quantization: Annotated[
        str,
        typer.Option(
            metavar="none|fp8|int8|int4",
            rich_help_panel=_COSTS,
            help="How the layers' weights are stored: fp8 and int8 take 8 bits each, int4 takes 4, plus scales.",
        ),
    ] = "none",
    num_requests: Annotated[
        int, typer.Option(min=1, rich_help_panel=_WORKLOAD, help="How many requests are sent.")
    ] = 1000,
    request_rate: Annotated[
        float,
        typer.Option(
            metavar="R|inf",
            rich_help_panel=_WORKLOAD,
            help="Requests per second, arriving at random. inf: all at once.",
        ),
    ] = math.inf,
    concurrency: Annotated[
        int, typer.Option(min=0, rich_help_panel=_WORKLOAD, help="Most requests in flight at once. 0: no limit.")
    ] = 0,
    prompt_len: Annotated[
        str,
        typer.Option(
            metavar="LENGTH",
            rich_help_panel=_WORKLOAD,
            help=f"Tokens in a prompt: {LENGTHS}.",
        ),
    ] = "128",
    output_len: Annotated[
        str, typer.Option(metavar="LENGTH", rich_help_panel=_WORKLOAD, help="Tokens in an output: as --prompt-len.")
    ] = "128",
    shared_prefix: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            rich_help_panel=_WORKLOAD,
            help="Fraction of each prompt that is a prefix shared with others.",
        ),
    ] = 0.0,
    num_prefixes: Annotated[
        int, typer.Option(min=1, rich_help_panel=_WORKLOAD, help="How many different shared prefixes there are.")
    ] = 1,
    arrivals: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.csv",
            rich_help_panel=_WORKLOAD,
            help="Take the requests from a file instead. Its header: arrival_s,prompt_len,output_len[,prefix_id].",
        ),
    ] = None,
    trace: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=_WORKLOAD,
            help="Take the requests, their tokens and times from a trace of `octavo up --trace FILE`. Its steps give "
            "the costs, and its settings hold where no others are given. May be given several times.",
        ),
    ] = None,
    acceptance: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            rich_help_panel=_WORKLOAD,
            help="Plan with speculation: the probability that a draft is right if those before it are. "
            "speculative_config bounds the drafts of a step; drafting itself takes no time.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, rich_help_panel=_WORKLOAD, help="Seed for lengths and arrivals.")] = 0,
    max_num_seqs: Annotated[str, _list_flag("Most sequences that a replica runs at once.")] = "",
    max_num_batched_tokens: Annotated[str, _list_flag("Token budget of one step.")] = "",
    data_parallel_size: Annotated[str, _list_flag("Replicas; each request goes to the least loaded.")] = "",
    tensor_parallel_size: Annotated[str, _list_flag("With --gpu: GPUs that share each layer.")] = "",
    pipeline_parallel_size: Annotated[str, _list_flag("With --gpu: stages, each with some of the layers.")] = "",
    max_itl_ms: Annotated[
        float | None,
        typer.Option(
            min=0, rich_help_panel=_OUTPUT, help="Limit for the 99th percentile of ITL, the time between tokens."
        ),
    ] = None,
    max_ttft_ms: Annotated[
        float | None,
        typer.Option(
            min=0, rich_help_panel=_OUTPUT, help="Limit for the 99th percentile of TTFT, the time to the first token."
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", rich_help_panel=_OUTPUT, help="Also plot the outcomes.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", rich_help_panel=_OUTPUT, help="Print one JSON object per line, for programs.")
    ] = False,
    **flags: Any,
) -> None:
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
    try:
        from octavo.plan.query import GpuQuery, Query, WorkloadQuery, answer, answer_for_device
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
            trace=trace or [],
            seed=seed,
        ),
        acceptance=acceptance,
        max_itl_ms=max_itl_ms,
        max_ttft_ms=max_ttft_ms,
    )
    if device:
        answer_for_device(query, device, as_json=as_json)
    elif not answer(query, plot=plot, as_json=as_json):
        raise typer.Exit(_NOTHING_WITHIN_LIMITS)
