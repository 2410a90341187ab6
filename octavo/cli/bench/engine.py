"""`octavo bench throughput` and `octavo bench latency`: the engine alone."""

from typing import Annotated, Any

import typer

from octavo.cli.bench.flags import JSON, OUTPUT_LEN, PROMPT_LEN, SEED, counts
from octavo.cli.flags import CONFIG_FLAG, options_from_flags


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
    numbers = counts(concurrency, "--concurrency")
    options = options_from_flags(config, flags)

    from octavo.bench.throughput import Bench
    from octavo.reports import print_reports, progress_bar

    bench = Bench(options, prompt_len=prompt_len, output_len=output_len, seed=seed)
    reports = []
    for count in numbers:
        with progress_bar(f"concurrency {count}", count * output_len, hidden=as_json) as advance:
            report = bench.measure(count, profile=profile, on_tokens=advance)
        reports.append(report)
        if as_json:
            print_reports([report], as_json=True)
    if not as_json:
        print_reports(reports, as_json=False)


def latency(
    config: CONFIG_FLAG = None,
    batch_size: Annotated[
        str, typer.Option(metavar="N,N,...", help="Requests of a batch; one measurement for each number.")
    ] = "8",
    prompt_len: PROMPT_LEN = 32,
    output_len: OUTPUT_LEN = 128,
    num_iters: Annotated[int, typer.Option(min=1, help="How many times a batch is measured.")] = 10,
    num_iters_warmup: Annotated[int, typer.Option(min=1, help="How many times it runs before that.")] = 2,
    seed: SEED = 0,
    as_json: JSON = False,
    **flags: Any,
) -> None:
    """Measure how long one batch takes, without router or sockets.

    All requests of a batch start together; its latency is the time until the last of them has ended, as in vLLM's
    `bench latency`. Each iteration has new prompts.

    Example: [bold]octavo bench latency --batch-size 1,8 --prompt-len 32 --output-len 128[/]
    """
    sizes = counts(batch_size, "--batch-size")
    options = options_from_flags(config, flags)

    from octavo.bench.latency import measure_latency
    from octavo.bench.throughput import Bench
    from octavo.reports import print_columns, print_json, progress_bar

    bench = Bench(options, prompt_len=prompt_len, output_len=output_len, seed=seed)
    columns = []
    for size in sizes:
        with progress_bar(f"batch of {size}", num_iters_warmup + num_iters, hidden=as_json) as advance:
            columns.append(
                measure_latency(bench, size, num_iters=num_iters, num_iters_warmup=num_iters_warmup, on_done=advance)
            )
        if as_json:
            print_json(columns[-1])
    if not as_json:
        print_columns(columns, note="latency: from the start of a batch to its end; mean, then percentiles")
