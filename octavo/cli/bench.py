"""`octavo bench throughput`, `octavo bench serve` and `octavo bench kernels`."""

import json
import math
import os
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.flags import (
    CONFIG_FLAG,
    SNAKE_CASE_FLAGS,
    TLS,
    TLS_CA,
    TLS_CERT,
    TLS_KEY,
    api_key,
    connection,
    options_from_flags,
    tls_context,
    with_option_flags,
)

if TYPE_CHECKING:
    from octavo.bench.backends.base import Backend
    from octavo.bench.tune.problem import Problem
    from octavo.bench.tune.tuner import Best, Tuner


class Tunable(StrEnum):
    FP8_GEMM = "fp8_gemm"
    MOE_GEMM = "moe_gemm"


class Protocol(StrEnum):
    GRPC = "grpc"
    OPENAI = "openai"
    OPENAI_CHAT = "openai-chat"


class Scales(StrEnum):
    BLOCK = "block"
    CHANNEL = "channel"
    NONE = "none"


def kernels(
    tune: Annotated[
        Tunable | None, typer.Option(help="The kernel whose fastest tile sizes are searched for and written to a file.")
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N,K|E,N,H,K",
            help="fp8_gemm: outputs and inputs of a linear layer. moe_gemm: experts of a rank, size of an expert, "
            "hidden size, experts of a token. May be given several times.",
        ),
    ] = None,
    scales: Annotated[
        Scales,
        typer.Option(
            help="block: one per 128 x 128 weights and per 128 inputs of a token. channel: one per output channel "
            "and per token. none: bf16, for moe_gemm."
        ),
    ] = Scales.BLOCK,
    batch_sizes: Annotated[
        str,
        typer.Option(
            metavar="M,M,...", help="Batch sizes to tune for. Default: those of vLLM's files, from 1 to 4096."
        ),
    ] = "",
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Where the files go. Default: where kernels look for them, $OCTAVO_TUNED_CONFIG_FOLDER or else "
            "fp8_gemm/ or moe_gemm/ in the cache directory."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line, for programs, and no progress bar.")
    ] = False,
) -> None:
    """Tune kernels on all visible GPUs of this machine.

    It can be interrupted at any time: the same command continues where it stopped.

    Example: [bold]octavo bench kernels --tune fp8_gemm --shape 4096,7168 --shape 7168,2048[/]

    Example: [bold]octavo bench kernels --tune moe_gemm --shape 128,768,2048,8 --scales none[/]
    """
    if tune is None:
        raise typer.BadParameter(
            f"is needed: one of {', '.join(Tunable)}; `python -m benchmarks.gpu.run_all` in the repository "
            "measures all kernels",
            param_hint="--tune",
        )
    if not shape:
        raise typer.BadParameter(
            "is needed, such as 4096,7168; the logs of workers name the shapes that lack a file", param_hint="--shape"
        )

    shapes = [_problem(tune, text, scales) for text in shape]
    wanted = "numbers above 0, such as 1,16,256"
    sizes = _numbers(batch_sizes, "--batch-sizes", wanted) if batch_sizes else None
    _tune(shapes, sizes, folder, as_json=as_json)


def _problem(tune: Tunable, text: str, scales: Scales) -> "Problem":
    """Raises typer.BadParameter."""
    from octavo.bench.tune.experts import ExpertsShape
    from octavo.bench.tune.problem import Shape

    if tune is Tunable.FP8_GEMM:
        if scales is Scales.NONE:
            raise typer.BadParameter("none: fp8_gemm has scales: use block or channel", param_hint="--scales")
        N, K = _numbers(text, "--shape", "two numbers above 0, such as 4096,7168", count=2)
        return Shape(N=N, K=K, blockwise=scales is Scales.BLOCK)
    if scales is Scales.CHANNEL:
        raise typer.BadParameter("channel: moe_gemm takes block, or none for bf16", param_hint="--scales")
    num_experts, size, hidden_size, top_k = _numbers(
        text, "--shape", "four numbers above 0, such as 128,768,2048,8", count=4
    )
    if top_k > num_experts:
        raise typer.BadParameter(f"{text!r}: a token has {top_k} of {num_experts} experts", param_hint="--shape")
    return ExpertsShape(
        num_experts=num_experts, size=size, hidden_size=hidden_size, top_k=top_k, is_fp8=scales is Scales.BLOCK
    )


def _tune(shapes: "Sequence[Problem]", sizes: list[int] | None, folder: Path | None, *, as_json: bool) -> None:
    from kernels.native.cache_directory import cache_directory
    from kernels.triton_common.tuned_tiles import FOLDER_VARIABLE
    from octavo.bench.tune.gpu_process import GpuProcess, measured_with, visible_device
    from octavo.bench.tune.problem import BATCH_SIZES
    from octavo.bench.tune.tuner import Tuner
    from octavo.reports import print_json

    device = visible_device()
    in_environment = os.environ.get(FOLDER_VARIABLE)
    folder = folder or (Path(in_environment) if in_environment else cache_directory(shapes[0].op))
    folder.mkdir(parents=True, exist_ok=True)
    tuner = Tuner(device, folder, measured_with(device), GpuProcess)
    try:
        for shape in shapes:
            path = _tune_shape(tuner, shape, sizes or BATCH_SIZES, as_json=as_json)
            if as_json:
                print_json({"op": shape.op, **shape.sizes, "file": str(path)})
    except KeyboardInterrupt:
        typer.echo(f"what was measured is kept in {folder}; the same command goes on from there", err=True)
        raise


def _tune_shape(tuner: "Tuner", shape: "Problem", sizes: Sequence[int], *, as_json: bool) -> Path:
    from octavo.bench.tune.output import best_as_json, print_table, title_of
    from octavo.reports import print_json, progress_bar

    bests: list[Best] = []

    def on_best(best: "Best") -> None:
        bests.append(best)
        if as_json:
            print_json(best_as_json(best))

    total = tuner.num_candidates(shape, sizes)
    with progress_bar(title_of(shape), total, hidden=as_json) as advance:
        path = tuner.tune(shape, sizes, on_tries=advance, on_best=on_best)
    if not as_json:
        print_table(shape, bests, path)
    return path


def _numbers(text: str, flag: str, wanted: str, count: int | None = None) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts) or count not in (None, len(parts)):
        raise typer.BadParameter(f"{text!r} is not {wanted}", param_hint=flag)
    return [int(part) for part in parts]


PROMPT_LEN = Annotated[int, typer.Option(min=1, help="Tokens in each prompt, drawn at random.")]
OUTPUT_LEN = Annotated[int, typer.Option(min=1, help="Tokens in each output, exactly.")]
SEED = Annotated[int, typer.Option(min=0, help="Seed for prompts and arrival times.")]
JSON = Annotated[
    bool, typer.Option("--json", help="Print one JSON object per line, for programs, and no progress bar.")
]


def register(app: typer.Typer, group: str) -> None:
    bench = typer.Typer(no_args_is_help=True, help="Measure a running cluster or the engine alone; tune GPU kernels.")
    bench.command()(serve)
    bench.command(context_settings=SNAKE_CASE_FLAGS)(with_option_flags(throughput))
    bench.command()(kernels)
    app.add_typer(bench, name="bench", rich_help_panel=group)


def serve(
    backend: Annotated[
        Protocol,
        typer.Option(
            help="How requests are sent. grpc: to Octavo's router. openai, openai-chat: over HTTP, to any server."
        ),
    ] = Protocol.GRPC,
    target: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="The router to measure, with --backend grpc.")
    ] = "localhost:50051",
    base_url: Annotated[
        str, typer.Option(metavar="URL", help="The server to measure over HTTP.")
    ] = "http://localhost:8000",
    endpoint: Annotated[
        str, typer.Option(metavar="PATH", help="HTTP path. Default: /v1/completions or /v1/chat/completions.")
    ] = "",
    model: Annotated[str, typer.Option(help="The model's name in HTTP requests. Default: the server's first.")] = "",
    extra_body: Annotated[
        str,
        typer.Option(
            metavar="JSON",
            help="An object whose fields each HTTP request gets, and null leaves out. Servers that are not known "
            'get OpenAI\'s fields only: {"temperature": 0, "ignore_eos": true} tells others what they need.',
        ),
    ] = "",
    text: Annotated[
        bool, typer.Option("--text", help="Prompts of random words, not token ids; chats always have such.")
    ] = False,
    vocab_size: Annotated[
        int, typer.Option(min=0, help="Token ids are below this. 0: what the server tells, or 10,000.")
    ] = 0,
    num_requests: Annotated[int, typer.Option(min=1, help="How many requests are sent.")] = 64,
    request_rate: Annotated[
        float, typer.Option(metavar="R|inf", help="Requests per second, arriving at random. inf: all at once.")
    ] = math.inf,
    concurrency: Annotated[int, typer.Option(min=0, help="Most requests in flight at once. 0: no limit.")] = 0,
    prompt_len: PROMPT_LEN = 128,
    output_len: OUTPUT_LEN = 128,
    seed: SEED = 0,
    tls: TLS = False,
    tls_ca: TLS_CA = None,
    tls_cert: TLS_CERT = None,
    tls_key: TLS_KEY = None,
    as_json: JSON = False,
) -> None:
    """Measure a running cluster, or another server, as clients see it.

    Reports throughput, and percentiles of latencies: TTFT is the time to the first token, ITL the time between tokens,
    e2e the time of the whole request. Exits with 1 if a request failed. An API key is read from OCTAVO_API_KEY.

    Example: [bold]octavo bench serve --num-requests 200 --request-rate 4[/]

    Example: [bold]octavo bench serve --backend openai --base-url http://localhost:8080[/]
    """
    import asyncio

    from octavo.bench.serve import Load, measure
    from octavo.reports import print_reports, progress_bar

    if not request_rate > 0:
        raise typer.BadParameter(f"{request_rate:g} is not above 0", param_hint="--request-rate")
    load = Load(
        num_requests=num_requests,
        rate=request_rate,
        concurrency=concurrency,
        prompt_len=prompt_len,
        output_len=output_len,
        seed=seed,
        vocab_size=vocab_size,
    )
    if backend is Protocol.GRPC:
        from octavo.bench.backends.grpc_calls import GrpcBackend

        calls: Backend = GrpcBackend(target, **connection(tls, tls_ca, tls_cert, tls_key))
    else:
        from octavo.bench.backends.openai_http import OpenAIBackend

        calls = OpenAIBackend(
            base_url,
            is_chat=backend is Protocol.OPENAI_CHAT,
            endpoint=endpoint,
            model=model,
            takes_text=text,
            extra_body=_object(extra_body),
            api_key=api_key(),
            tls=tls_context(tls_ca, tls_cert, tls_key),
        )
    with progress_bar("requests", num_requests, hidden=as_json) as advance:
        report = asyncio.run(measure(load, calls, lambda trace: advance(1)))
    print_reports([report], as_json=as_json)
    errors = [trace.error for trace in report.traces if trace.error]
    if errors:
        typer.echo(f"{len(errors)} of {num_requests} requests failed; the first: {errors[0]}", err=True)
        raise typer.Exit(1)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not valid JSON: {error}", param_hint="--extra-body") from None
    if not isinstance(value, dict):
        raise typer.BadParameter(f"{text!r} is not a JSON object", param_hint="--extra-body")
    return value


def throughput(
    config: CONFIG_FLAG = None,
    concurrency: Annotated[
        str, typer.Option(metavar="N,N,...", help="Requests in flight at once; one measurement for each number.")
    ] = "1,8,32,64",
    prompt_len: PROMPT_LEN = 128,
    output_len: OUTPUT_LEN = 128,
    seed: SEED = 0,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile",
            help="Also split the time of a step, in a separate pass: GEMM, attention, rope, scheduling, Python.",
        ),
    ] = False,
    as_json: JSON = False,
    **flags: Any,
) -> None:
    """Measure the engine alone, without router or sockets.

    Scheduler core and worker run in one process. For each concurrency, that many requests start together and run to
    their end; a short run warms up first.

    Example: [bold]octavo bench throughput --concurrency 1,64 --worker-threads 2[/]
    """
    counts = _counts(concurrency)
    options = options_from_flags(config, flags)

    from octavo.bench.throughput import Bench
    from octavo.reports import print_reports, progress_bar

    bench = Bench(options, prompt_len=prompt_len, output_len=output_len, seed=seed)
    reports = []
    for count in counts:
        with progress_bar(f"concurrency {count}", count * output_len, hidden=as_json) as advance:
            report = bench.measure(count, profile=profile, on_tokens=advance)
        reports.append(report)
        if as_json:
            print_reports([report], as_json=True)
    if not as_json:
        print_reports(reports, as_json=False)


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise typer.BadParameter(f"{text!r} is not a list of numbers above 0, as in 1,8", param_hint="--concurrency")
    return counts
