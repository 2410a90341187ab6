"""`octavo bench serve` and `octavo bench throughput`; `octavo bench kernels` is in bench_kernels."""

import math
from typing import Annotated, Any

import typer

from octavo.cli.bench_kernels import kernels
from octavo.cli.option_flags import CONFIG_FLAG, SNAKE_CASE_FLAGS, options_from_flags, with_option_flags

PROMPT_LEN = Annotated[int, typer.Option(min=1, help="Tokens of each prompt, drawn at random.")]
OUTPUT_LEN = Annotated[int, typer.Option(min=1, help="Tokens of each output, exactly.")]
SEED = Annotated[int, typer.Option(min=0, help="Of prompts and arrival times.")]
JSON = Annotated[bool, typer.Option("--json", help="One JSON object a line, for programs; no progress bar.")]


def register(app: typer.Typer) -> None:
    bench = typer.Typer(no_args_is_help=True, help="Measure a running cluster, the engine alone, or kernels.")
    bench.command()(serve)
    bench.command(context_settings=SNAKE_CASE_FLAGS)(with_option_flags(throughput))
    bench.command()(kernels)
    app.add_typer(bench, name="bench")


def serve(
    target: Annotated[str, typer.Option(metavar="HOST:PORT", help="The router.")] = "localhost:50051",
    num_requests: Annotated[int, typer.Option(min=1, help="How many are sent.")] = 64,
    request_rate: Annotated[
        float, typer.Option(metavar="R|inf", help="Requests a second, arriving at random; inf: all at once.")
    ] = math.inf,
    concurrency: Annotated[int, typer.Option(min=0, help="Requests under way at most; 0: no bound.")] = 0,
    prompt_len: PROMPT_LEN = 128,
    output_len: OUTPUT_LEN = 128,
    seed: SEED = 0,
    as_json: JSON = False,
) -> None:
    """Measure a running cluster as its clients see it: throughput, and latencies with their percentiles.

    TTFT is the time to the first token, ITL the time between tokens, e2e that of the whole request. Exits with 1 if a
    request failed.

    Example: [bold]octavo bench serve --num-requests 200 --request-rate 4[/]
    """
    import asyncio

    from octavo.bench.progress import progress_bar
    from octavo.bench.report import print_reports
    from octavo.bench.serve import Load, measure

    if not request_rate > 0:
        raise typer.BadParameter(f"{request_rate:g} is not above 0", param_hint="--request-rate")
    load = Load(
        target=target,
        num_requests=num_requests,
        rate=request_rate,
        concurrency=concurrency,
        prompt_len=prompt_len,
        output_len=output_len,
        seed=seed,
    )
    with progress_bar("requests", num_requests, hidden=as_json) as advance:
        report = asyncio.run(measure(load, lambda trace: advance(1)))
    print_reports([report], as_json=as_json)
    errors = [trace.error for trace in report.traces if trace.error]
    if errors:
        typer.echo(f"{len(errors)} of {num_requests} requests failed; the first: {errors[0]}", err=True)
        raise typer.Exit(1)


def throughput(
    config: CONFIG_FLAG = None,
    concurrency: Annotated[
        str, typer.Option(metavar="N,N,...", help="Requests at once; one measurement for each number.")
    ] = "1,8,32,64",
    prompt_len: PROMPT_LEN = 128,
    output_len: OUTPUT_LEN = 128,
    seed: SEED = 0,
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Also run torch's profiler, in a pass of its own: GEMM, attention, other ops."),
    ] = False,
    as_json: JSON = False,
    **flags: Any,
) -> None:
    """Measure the engine alone: scheduler core and worker in one process, without router or sockets.

    For each concurrency, so many requests begin together and run to their end; a short run before it warms up.

    Example: [bold]octavo bench throughput --concurrency 1,64 --worker-threads 2[/]
    """
    counts = _counts(concurrency)
    options = options_from_flags(config, flags)

    from octavo.bench.progress import progress_bar
    from octavo.bench.report import print_reports
    from octavo.bench.throughput import Bench

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
        raise typer.BadParameter(f"{text!r} is no list of numbers above 0, such as 1,8,32", param_hint="--concurrency")
    return counts
