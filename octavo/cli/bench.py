"""`octavo bench`: a running cluster as its clients see it, the engine alone, and GPU kernels."""

import json
import math
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from configs.load import ConfigError
from octavo.cli import kernels, tune
from octavo.cli.flags import (
    CONFIG_FLAG,
    JSON,
    SNAKE_CASE_FLAGS,
    Connection,
    TlsFlags,
    api_key,
    options_from_flags,
    parse_counts,
    parse_rates,
    with_option_flags,
)
from octavo.lab.flags import DatasetKind, LoadFlags, Ramp, flag, with_flags

if TYPE_CHECKING:
    from octavo.bench.arrivals import Arrivals
    from octavo.bench.backends.base import Backend
    from octavo.reports import Report


def register(app: typer.Typer, group: str) -> None:
    bench = typer.Typer(no_args_is_help=True, help="Measure a running cluster or the engine alone; tune GPU kernels.")
    bench.command()(with_flags(serve))
    for command in (throughput, latency):
        bench.command(context_settings=SNAKE_CASE_FLAGS)(with_option_flags(command))
    tune.register_sweep(bench)
    bench.command()(with_flags(kernels.kernels))
    app.add_typer(bench, name="bench", rich_help_panel=group)


class Protocol(StrEnum):
    GRPC = "grpc"
    OPENAI = "openai"
    OPENAI_CHAT = "openai-chat"


_SERVER, _REQUESTS, _TIMES, _OUTPUT = "The server", "What is sent", "When it is sent", "Output"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeFlags:
    """The flags as given."""

    backend: Protocol = flag(
        Protocol.GRPC,
        _SERVER,
        "How requests are sent. grpc: to Octavo's router. openai, openai-chat: over HTTP, to any server.",
    )
    target: str = flag("localhost:50051", _SERVER, "The router to measure, with --backend grpc.", metavar="HOST:PORT")
    base_url: str = flag("http://localhost:8000", _SERVER, "The server to measure over HTTP.", metavar="URL")
    endpoint: str = flag("", _SERVER, "HTTP path. Default: /v1/completions or /v1/chat/completions.", metavar="PATH")
    model: str = flag("", _SERVER, "The model's name in HTTP requests. Default: the server's first.")
    extra_body: str = flag(
        "",
        _SERVER,
        "An object whose fields each HTTP request gets, and null leaves out. Servers that are not known get OpenAI's "
        'fields only: {"temperature": 0, "ignore_eos": true} tells others what they need.',
        metavar="JSON",
    )
    num_requests: int = flag(64, _REQUESTS, "How many requests are sent; files may have fewer.", min=1)
    tokenizer: str = flag(
        "",
        _REQUESTS,
        "With --dataset sharegpt: counts the tokens of answers. Default: one for each 4 characters.",
        metavar="DIR|MODEL",
    )
    text: bool = flag(
        False, _REQUESTS, "Over HTTP: send prompts of random words instead of token ids; chats always do.", "--text"
    )
    vocab_size: int = flag(0, _REQUESTS, "Token ids are below this. 0: what the server tells, or 10,000.", min=0)
    request_rate: str = flag(
        "inf",
        _TIMES,
        "Requests per second, arriving at random. inf: all at once, or at the dataset's times. Several: one "
        "measurement for each.",
        metavar="R|inf,...",
    )
    ramp_up: Ramp | None = flag(
        None, _TIMES, "The rate goes from --request-rate to --ramp-to, by equal steps or factors."
    )
    ramp_to: float = flag(0.0, _TIMES, "With --ramp-up: the rate at the end.", metavar="R")
    speed: float = flag(1.0, _TIMES, "Speeds up the dataset's arrival times by this factor, with rate inf.")
    concurrency: int = flag(0, _TIMES, "Most requests in flight at once. 0: no limit.", min=0)
    goodput: list[str] | None = flag(
        None,
        _OUTPUT,
        "Also count the requests within limits, in milliseconds: ttft:500,tpot:50,itl:200,e2e:4000.",
        metavar="NAME:MS",
    )
    plot: Path | None = flag(None, _OUTPUT, "Draw the rates (PNG, SVG or PDF; octavo[plan]).", metavar="FILE")


def serve(
    *,
    query: ServeFlags,
    tls: TlsFlags,
    as_json: JSON = False,
    load: LoadFlags,
) -> None:
    """Measure a running cluster, or another server, as clients see it.

    Reports throughput, and percentiles of latencies: TTFT is the time to the first token, ITL the time between tokens,
    e2e the time of the whole request. Exits with 1 if a request failed. An API key is read from OCTAVO_API_KEY.

    Example: [bold]octavo bench serve --num-requests 200 --request-rate 1,2,4,8 --goodput ttft:1000,itl:200[/]

    Example: [bold]octavo bench serve --dataset prefixes --prefix-len 512 --num-prefixes 4 --prompt-len 600[/]

    Example: [bold]octavo bench serve --backend openai --base-url http://localhost:8080[/]
    """
    import asyncio

    from octavo.bench.datasets.chosen import DEFAULT_LEN, choose
    from octavo.bench.goodput import parse_limits
    from octavo.bench.serve import Load, measure
    from octavo.reports import print_reports, progress_bar

    if query.plot is not None and find_spec("matplotlib") is None:
        raise ConfigError("--plot needs the package matplotlib: pip install 'octavo[plan]'")
    if not 0 < query.speed < math.inf:
        raise typer.BadParameter(f"{query.speed:g} is not above 0", param_hint="--speed")
    processes = [_arrivals(rate, load.burstiness, query) for rate in parse_rates(query.request_rate)]
    chosen = choose(load, tokenizer=query.tokenizer)
    lengths = [each or DEFAULT_LEN for each in (load.prompt_len, load.output_len)]
    is_plain = load.dataset is DatasetKind.RANDOM and all(each.isdecimal() for each in lengths)
    prompt_len, output_len = (int(each if is_plain else DEFAULT_LEN) for each in lengths)
    limits = parse_limits(query.goodput, "--goodput") if query.goodput else None
    connected = tls.connection()

    def calls() -> "Backend":
        if query.backend is Protocol.GRPC:
            from octavo.bench.backends.grpc_calls import GrpcBackend

            return GrpcBackend(query.target, **connected)
        from octavo.bench.backends.openai_http import OpenAIBackend

        return OpenAIBackend(
            query.base_url,
            is_chat=query.backend is Protocol.OPENAI_CHAT,
            endpoint=query.endpoint,
            model=query.model,
            takes_text=query.text,
            extra_body=_object(query.extra_body),
            api_key=api_key(),
            tls=tls.context(),
        )

    reports: list[Report] = []
    for number, arrivals in enumerate(processes):
        # Drawn prompts are others at each rate.
        if number and not chosen.is_drawn:
            if query.backend is Protocol.GRPC:
                _forget(query.target, connected)
            elif number == 1:
                typer.echo("note: at each rate but the first, the server may know the file's prompts", err=True)
        sent = Load(
            num_requests=query.num_requests,
            arrivals=arrivals,
            concurrency=query.concurrency,
            prompt_len=prompt_len,
            output_len=output_len,
            seed=load.seed + number,
            vocab_size=query.vocab_size,
            dataset=None if is_plain else chosen,
            speed=query.speed,
            limits=limits,
        )
        label = "requests" if len(processes) == 1 else f"rate {arrivals.rate:g}"
        with progress_bar(label, query.num_requests, hidden=as_json) as advance:
            reports.append(asyncio.run(measure(sent, calls(), lambda trace: advance(1))))
        if as_json:
            print_reports(reports[-1:], as_json=True)
    if not as_json:
        print_reports(reports, as_json=False)
    if query.plot is not None:
        _draw(query.plot, [each.rate for each in processes], [report.as_json() for report in reports], chosen.name)
    errors = [trace.error for report in reports for trace in report.traces if trace.error]
    if errors:
        sent = sum(len(report.traces) for report in reports)
        typer.echo(f"{len(errors)} of {sent} requests failed; the first: {errors[0]}", err=True)
        raise typer.Exit(1)


# The keys of a report that each panel of a plot has; those that all reports tell are drawn.
_PANELS = {
    "output tokens/s": ("output_tok_s",),
    "requests/s": ("requests_s", "goodput_requests_s"),
    "first token, s": ("ttft_s_p50", "ttft_s_p99"),
    "between tokens, ms": ("itl_ms_p50", "itl_ms_p99"),
    "whole request, s": ("e2e_s_p50", "e2e_s_p99"),
}


def _draw(path: Path, rates: list[float], columns: list[dict[str, Any]], dataset: str) -> None:
    from octavo.lab.figures import draw_over_rates

    panels = {
        name: {
            key: [column[key] for column in columns]
            for key in keys
            if all(column.get(key) is not None for column in columns)
        }
        for name, keys in _PANELS.items()
    }
    title = f"{columns[0]['model']}, {columns[0]['engine']}, {dataset}"
    draw_over_rates(path, rates, panels, title=title, flag="--plot")


def _forget(target: str, connected: Connection) -> None:
    """Empties the prefix caches, so that files' prompts are as new at each rate as at the first."""
    from octavo.client.admin import Admin

    with Admin(target, **connected) as admin:
        admin.reset_prefix_cache()


def _arrivals(rate: float, burstiness: float, query: ServeFlags) -> "Arrivals":
    from octavo.bench.arrivals import Arrivals

    ramp_up, ramp_to = query.ramp_up, query.ramp_to
    if (ramp_up is None) != (ramp_to == 0) or ramp_to < 0 or ramp_to == math.inf:
        raise typer.BadParameter(
            f"{ramp_to:g}: --ramp-up goes with a --ramp-to above 0, and not without", param_hint="--ramp-to"
        )
    if ramp_up is not None and rate == math.inf:
        raise typer.BadParameter("a ramp begins at a rate, not at inf", param_hint="--request-rate")
    return Arrivals(rate=rate, burstiness=burstiness, ramp=ramp_up, ramp_to=ramp_to)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not valid JSON: {error}", param_hint="--extra-body") from None
    if not isinstance(value, dict):
        raise typer.BadParameter(f"{text!r} is not a JSON object", param_hint="--extra-body")
    return value


_PROMPT_LEN = Annotated[int, typer.Option(min=1, help="Tokens in each prompt, drawn at random.")]
_OUTPUT_LEN = Annotated[int, typer.Option(min=1, help="Tokens in each output, exactly.")]
_SEED = Annotated[int, typer.Option(min=0, help="Seed for prompts and arrival times.")]


def throughput(
    config: CONFIG_FLAG = None,
    concurrency: Annotated[
        str, typer.Option(metavar="N,N,...", help="Requests in flight at once; one measurement for each number.")
    ] = "1,8,32,64",
    prompt_len: _PROMPT_LEN = 128,
    output_len: _OUTPUT_LEN = 128,
    seed: _SEED = 0,
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
    numbers = parse_counts(concurrency, "--concurrency")
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
    prompt_len: _PROMPT_LEN = 32,
    output_len: _OUTPUT_LEN = 128,
    num_iters: Annotated[int, typer.Option(min=1, help="How many times a batch is measured.")] = 10,
    num_iters_warmup: Annotated[int, typer.Option(min=1, help="How many times it runs before that.")] = 2,
    seed: _SEED = 0,
    as_json: JSON = False,
    **flags: Any,
) -> None:
    """Measure how long one batch takes, without router or sockets.

    All requests of a batch start together; its latency is the time until the last of them has ended, as in vLLM's
    `bench latency`. Each iteration has new prompts.

    Example: [bold]octavo bench latency --batch-size 1,8 --prompt-len 32 --output-len 128[/]
    """
    sizes = parse_counts(batch_size, "--batch-size")
    options = options_from_flags(config, flags)

    from octavo.bench.throughput import Bench, measure_latency
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
