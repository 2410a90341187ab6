"""`octavo explain`, `octavo migrate` and `octavo cache`: commands for those who run a cluster."""

import dataclasses
import json
from typing import Annotated

import typer

from octavo.cli.flags import TARGET, TLS, TLS_CA, TLS_CERT, TLS_KEY, connection, note_unreachable, reaching


def register_cache(app: typer.Typer) -> None:
    cache = typer.Typer(no_args_is_help=True, help="The prefix caches of a running cluster.")
    cache.command()(reset)
    app.add_typer(cache, name="cache")


def reset(
    target: TARGET = "localhost:50051",
    tls: TLS = False,
    tls_ca: TLS_CA = None,
    tls_cert: TLS_CERT = None,
    tls_key: TLS_KEY = None,
) -> None:
    """Forget what is cached: later requests share no blocks with earlier ones. What runs goes on undisturbed.

    For measurements that must begin cold.
    """
    from octavo.client.admin import Admin

    to = connection(tls, tls_ca, tls_cert, tls_key)
    with reaching(target), Admin(target, **to) as admin:
        reset = admin.reset_prefix_cache()
    note_unreachable(reset.unreachable)
    typer.echo(f"{reset.num_blocks:,} KV blocks were cached and can't be found any more")


def register_migrate(app: typer.Typer) -> None:
    app.command()(migrate)


def migrate(
    request_id: Annotated[
        str, typer.Argument(metavar="ID", help="The request's id, as clients and logs have it.", show_default=False)
    ],
    to: Annotated[
        str,
        typer.Option(metavar="ADDRESS", help="A replica, as scheduler_addresses has it. Empty: the router chooses."),
    ] = "",
    target: TARGET = "localhost:50051",
    tls: TLS = False,
    tls_ca: TLS_CA = None,
    tls_cert: TLS_CERT = None,
    tls_key: TLS_KEY = None,
) -> None:
    """Have another replica go on with a live request: the same tokens, after a pause.

    The target is the router that streams it.
    """
    from octavo.client.admin import Admin

    connected = connection(tls, tls_ca, tls_cert, tls_key)
    with reaching(target), Admin(target, **connected) as admin:
        done = admin.migrate(request_id, to)
    typer.echo(f"moved after {done.num_output_tokens:,} output tokens, from {done.moved_from} to {done.moved_to}")


def register_explain(app: typer.Typer) -> None:
    app.command()(explain)


def explain(
    request_id: Annotated[
        str, typer.Argument(metavar="ID", help="The request's id, as clients and logs have it.", show_default=False)
    ],
    target: TARGET = "localhost:50051",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line and timeline, for programs.")] = False,
    tls: TLS = False,
    tls_ca: TLS_CA = None,
    tls_cert: TLS_CERT = None,
    tls_key: TLS_KEY = None,
) -> None:
    """Show what happened to a request, and where its time went: queued, prefill, decode, preempted.

    Each replica knows the requests it has now and the latest that have finished. `octavo chat -v` and `octavo complete
    -v` show a request's id; in Python it is `request_id` of a result.

    Example: [bold]octavo explain 7d5ad9f3cd6f4ac8a3e9e8cd2b7ff3e4[/]
    """
    from rich.console import Console

    from octavo.cli.timeline import choices_of, draw, seconds_by_phase, spans_of
    from octavo.client.admin import Admin

    to = connection(tls, tls_ca, tls_cert, tls_key)
    with reaching(target), Admin(target, **to) as admin:
        explanation = admin.explain(request_id)
    note_unreachable(explanation.unreachable)
    console = Console()
    for number, timeline in enumerate(explanation.timelines):
        if as_json:
            seconds = {choice: seconds_by_phase(spans_of(timeline, choice)) for choice in choices_of(timeline)}
            print(json.dumps(dataclasses.asdict(timeline) | {"seconds": seconds}))
            continue
        if number:
            console.print()
        draw(timeline, console)
