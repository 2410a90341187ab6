"""`octavo bench serve`."""

import json
import math
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from configs.load import ConfigError
from octavo.cli.bench.flags import JSON
from octavo.cli.bench.load_flags import Dataset, LoadFlags
from octavo.cli.flags import TLS, TLS_CA, TLS_CERT, TLS_KEY, Connection, api_key, connection, tls_context

if TYPE_CHECKING:
    from octavo.bench.arrivals import Arrivals
    from octavo.bench.backends.base import Backend
    from octavo.reports import Report


class Protocol(StrEnum):
    GRPC = "grpc"
    OPENAI = "openai"
    OPENAI_CHAT = "openai-chat"


# As octavo.bench.arrivals.Ramp, which imports numpy.
class RampUp(StrEnum):
    LINEAR = "linear"
    EXPONENTIAL = "exponential"


_SERVER, _REQUESTS, _TIMES, _OUTPUT = "The server", "What is sent", "When it is sent", "Output"


def serve(
    load: LoadFlags,
    backend: Annotated[
        Protocol,
        typer.Option(
            rich_help_panel=_SERVER,
            help="How requests are sent. grpc: to Octavo's router. openai, openai-chat: over HTTP, to any server.",
        ),
    ] = Protocol.GRPC,
    target: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", rich_help_panel=_SERVER, help="The router to measure, with --backend grpc."),
    ] = "localhost:50051",
    base_url: Annotated[
        str, typer.Option(metavar="URL", rich_help_panel=_SERVER, help="The server to measure over HTTP.")
    ] = "http://localhost:8000",
    endpoint: Annotated[
        str,
        typer.Option(
            metavar="PATH",
            rich_help_panel=_SERVER,
            help="HTTP path. Default: /v1/completions or /v1/chat/completions.",
        ),
    ] = "",
    model: Annotated[
        str,
        typer.Option(rich_help_panel=_SERVER, help="The model's name in HTTP requests. Default: the server's first."),
    ] = "",
    extra_body: Annotated[
        str,
        typer.Option(
            metavar="JSON",
            rich_help_panel=_SERVER,
            help="An object whose fields each HTTP request gets, and null leaves out. Servers that are not known "
            'get OpenAI\'s fields only: {"temperature": 0, "ignore_eos": true} tells others what they need.',
        ),
    ] = "",
    num_requests: Annotated[
        int, typer.Option(min=1, rich_help_panel=_REQUESTS, help="How many requests are sent; files may have fewer.")
    ] = 64,
    tokenizer: Annotated[
        str,
        typer.Option(
            metavar="DIR|MODEL",
            rich_help_panel=_REQUESTS,
            help="With --dataset sharegpt: counts the tokens of answers. Default: one for each 4 characters.",
        ),
    ] = "",
    text: Annotated[
        bool,
        typer.Option(
            "--text",
            rich_help_panel=_REQUESTS,
            help="Over HTTP: send prompts of random words instead of token ids; chats always do.",
        ),
    ] = False,
    vocab_size: Annotated[
        int,
        typer.Option(
            min=0, rich_help_panel=_REQUESTS, help="Token ids are below this. 0: what the server tells, or 10,000."
        ),
    ] = 0,
    request_rate: Annotated[
        str,
        typer.Option(
            metavar="R|inf,...",
            rich_help_panel=_TIMES,
            help="Requests per second, arriving at random. inf: all at once, or at the dataset's times. "
            "Several: one measurement for each.",
        ),
    ] = "inf",
    ramp_up: Annotated[
        RampUp | None,
        typer.Option(
            rich_help_panel=_TIMES, help="The rate goes from --request-rate to --ramp-to, by equal steps or factors."
        ),
    ] = None,
    ramp_to: Annotated[
        float, typer.Option(metavar="R", rich_help_panel=_TIMES, help="With --ramp-up: the rate at the end.")
    ] = 0.0,
    speed: Annotated[
        float,
        typer.Option(
            rich_help_panel=_TIMES, help="Speeds up the dataset's arrival times by this factor, with rate inf."
        ),
    ] = 1.0,
    concurrency: Annotated[
        int, typer.Option(min=0, rich_help_panel=_TIMES, help="Most requests in flight at once. 0: no limit.")
    ] = 0,
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:MS",
            rich_help_panel=_OUTPUT,
            help="Also count the requests within limits, in milliseconds: ttft:500,tpot:50,itl:200,e2e:4000.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", rich_help_panel=_OUTPUT, help="Draw the rates (PNG, SVG or PDF; octavo[plan])."),
    ] = None,
    tls: TLS = False,
    tls_ca: TLS_CA = None,
    tls_cert: TLS_CERT = None,
    tls_key: TLS_KEY = None,
    as_json: JSON = False,
) -> None:
    """Measure a running cluster, or another server, as clients see it.

    Reports throughput, and percentiles of latencies: TTFT is the time to the first token, ITL the time between tokens,
    e2e the time of the whole request. Exits with 1 if a request failed. An API key is read from OCTAVO_API_KEY.

    Example: [bold]octavo bench serve --num-requests 200 --request-rate 1,2,4,8 --goodput ttft:1000,itl:200[/]

    Example: [bold]octavo bench serve --dataset prefixes --prefix-len 512 --num-prefixes 4 --prompt-len 600[/]

    Example: [bold]octavo bench serve --backend openai --base-url http://localhost:8080[/]
    """
    import asyncio

    from octavo.bench.datasets.chosen import choose
    from octavo.bench.goodput import parse_limits
    from octavo.bench.serve import Load, measure
    from octavo.reports import print_reports, progress_bar

    if plot is not None and find_spec("matplotlib") is None:
        raise ConfigError("--plot needs the package matplotlib: pip install 'octavo[plan]'")
    if not 0 < speed < math.inf:
        raise typer.BadParameter(f"{speed:g} is not above 0", param_hint="--speed")
    query = load.query(tokenizer=tokenizer)
    processes = [_arrivals(rate, load.burstiness, ramp_up, ramp_to) for rate in parse_rates(request_rate)]
    chosen = choose(query)
    lengths = (load.prompt_len, load.output_len)
    is_plain = load.dataset is Dataset.RANDOM and all(not each or each.isdecimal() for each in lengths)
    prompt_len, output_len = (int(each or 128) if is_plain else 128 for each in lengths)
    limits = parse_limits(goodput, "--goodput") if goodput else None
    connected = connection(tls, tls_ca, tls_cert, tls_key)

    def calls() -> "Backend":
        if backend is Protocol.GRPC:
            from octavo.bench.backends.grpc_calls import GrpcBackend

            return GrpcBackend(target, **connected)
        from octavo.bench.backends.openai_http import OpenAIBackend

        return OpenAIBackend(
            base_url,
            is_chat=backend is Protocol.OPENAI_CHAT,
            endpoint=endpoint,
            model=model,
            takes_text=text,
            extra_body=_object(extra_body),
            api_key=api_key(),
            tls=tls_context(tls_ca, tls_cert, tls_key),
        )

    reports: list[Report] = []
    for number, arrivals in enumerate(processes):
        # Drawn prompts are others at each rate.
        if number and not chosen.is_drawn:
            if backend is Protocol.GRPC:
                _forget(target, connected)
            elif number == 1:
                typer.echo("note: at each rate but the first, the server may know the file's prompts", err=True)
        sent = Load(
            num_requests=num_requests,
            arrivals=arrivals,
            concurrency=concurrency,
            prompt_len=prompt_len,
            output_len=output_len,
            seed=load.seed + number,
            vocab_size=vocab_size,
            dataset=None if is_plain else chosen,
            speed=speed,
            limits=limits,
        )
        label = "requests" if len(processes) == 1 else f"rate {arrivals.rate:g}"
        with progress_bar(label, num_requests, hidden=as_json) as advance:
            reports.append(asyncio.run(measure(sent, calls(), lambda trace: advance(1))))
        if as_json:
            print_reports(reports[-1:], as_json=True)
    if not as_json:
        print_reports(reports, as_json=False)
    if plot is not None:
        from octavo.bench.plots import draw_rates

        columns = [report.as_json() for report in reports]
        draw_rates(plot, columns, title=f"{columns[0]['model']}, {columns[0]['engine']}, {chosen.name}")
    errors = [trace.error for report in reports for trace in report.traces if trace.error]
    if errors:
        sent = sum(len(report.traces) for report in reports)
        typer.echo(f"{len(errors)} of {sent} requests failed; the first: {errors[0]}", err=True)
        raise typer.Exit(1)


def _forget(target: str, connected: Connection) -> None:
    """Empties the prefix caches, so that files' prompts are as new at each rate as at the first."""
    from octavo.client.admin import Admin

    with Admin(target, **connected) as admin:
        admin.reset_prefix_cache()


def parse_rates(text: str) -> list[float]:
    """Parses rates. Raises typer.BadParameter."""
    found = []
    for part in text.split(","):
        try:
            rate = float(part)
        except ValueError:
            rate = 0.0
        if not rate > 0:
            raise typer.BadParameter(
                f"{part} is not above 0: give requests per second, inf, or several as in 1,2,4",
                param_hint="--request-rate",
            )
        found.append(rate)
    return found


def _arrivals(rate: float, burstiness: float, ramp_up: RampUp | None, ramp_to: float) -> "Arrivals":
    from octavo.bench.arrivals import Arrivals, Ramp

    if (ramp_up is None) != (ramp_to == 0) or ramp_to < 0 or ramp_to == math.inf:
        raise typer.BadParameter(
            f"{ramp_to:g}: --ramp-up goes with a --ramp-to above 0, and not without", param_hint="--ramp-to"
        )
    if ramp_up is not None and rate == math.inf:
        raise typer.BadParameter("a ramp begins at a rate, not at inf", param_hint="--request-rate")
    return Arrivals(rate=rate, burstiness=burstiness, ramp=Ramp(ramp_up) if ramp_up else None, ramp_to=ramp_to)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not valid JSON: {error}", param_hint="--extra-body") from None
    if not isinstance(value, dict):
        raise typer.BadParameter(f"{text!r} is not a JSON object", param_hint="--extra-body")
    return value
