"""`octavo top`, `octavo explain`, `octavo migrate` and `octavo cache`: commands for operators of a cluster."""

import dataclasses
import json
from typing import Annotated

import typer

from octavo.cli.flags import TARGET, TlsFlags, note_unreachable, reaching
from octavo.client.errors import OctavoError
from octavo.lab.flags import with_flags


def register_top(app: typer.Typer, group: str) -> None:
    app.command(rich_help_panel=group)(with_flags(top))


def top(
    target: TARGET = "localhost:50051",
    *,
    tls: TlsFlags,
) -> None:
    """Watch a running cluster: replicas, queues, blocks, requests.

    Keys: Tab goes from table to table, Enter explains a request. p pauses a replica, d drains it, r releases it, and m
    moves a request to another replica; each asks first. With API keys, OCTAVO_API_KEY must be one with `admin: true` to
    see more than its own requests.
    """
    from octavo.client.admin import Admin

    try:
        from octavo.top.app import Top
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("textual"):
            raise
        raise OctavoError("`octavo top` needs the package textual: pip install 'octavo[top]'") from None
    with Admin(target, timeout=5.0, **tls.connection()) as admin:
        Top(admin, target).run()


def register_cache(app: typer.Typer, group: str) -> None:
    cache = typer.Typer(no_args_is_help=True, help="Empty the prefix caches of a running cluster.")
    cache.command()(with_flags(reset))
    app.add_typer(cache, name="cache", rich_help_panel=group)


def reset(
    target: TARGET = "localhost:50051",
    *,
    tls: TlsFlags,
) -> None:
    """Empty the prefix caches, for measurements that must start cold.

    Later requests share no blocks with earlier ones; running requests are not disturbed.
    """
    from octavo.client.admin import Admin

    to = tls.connection()
    with reaching(target), Admin(target, **to) as admin:
        reset = admin.reset_prefix_cache()
    note_unreachable(reset.unreachable)
    typer.echo(f"{reset.num_blocks:,} cached KV blocks were forgotten")


def register_migrate(app: typer.Typer, group: str) -> None:
    app.command(rich_help_panel=group)(with_flags(migrate))


def migrate(
    request_id: Annotated[
        str, typer.Argument(metavar="ID", help="The request's id, as clients and logs show it.", show_default=False)
    ],
    to: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS", help="The replica to move to, as in scheduler_addresses. Empty: the router chooses."
        ),
    ] = "",
    target: TARGET = "localhost:50051",
    *,
    tls: TlsFlags,
) -> None:
    """Move a running request to another replica without losing tokens.

    Its stream pauses, then continues with the tokens it would have had. --target is the router that
    streams it, or another one of the cluster.
    """
    from octavo.client.admin import Admin

    connected = tls.connection()
    with reaching(target), Admin(target, **connected) as admin:
        done = admin.migrate(request_id, to)
    typer.echo(f"moved after {done.num_output_tokens:,} output tokens, from {done.moved_from} to {done.moved_to}")


def register_explain(app: typer.Typer, group: str) -> None:
    app.command(rich_help_panel=group)(with_flags(explain))


def explain(
    request_id: Annotated[
        str, typer.Argument(metavar="ID", help="The request's id, as clients and logs show it.", show_default=False)
    ],
    target: TARGET = "localhost:50051",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each timeline as a line of JSON, for programs.")
    ] = False,
    *,
    tls: TlsFlags,
) -> None:
    """Show what happened to a request and where its time went.

    Splits its time into queued, prefill, decode and preempted. Each replica knows its live requests and those that
    finished last. `octavo chat -v` and `octavo complete -v` print a request's id; in Python, it is `request_id` of a
    result.

    Example: [bold]octavo explain 7d5ad9f3cd6f4ac8a3e9e8cd2b7ff3e4[/]
    """
    from rich.console import Console

    from octavo.client.admin import Admin
    from octavo.timeline import choices_of, draw, seconds_by_phase, spans_of

    to = tls.connection()
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
