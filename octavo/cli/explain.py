"""`octavo explain`."""

import dataclasses
import json
from typing import Annotated

import typer

from octavo.cli.target import TARGET, TLS, TLS_CA, TLS_CERT, TLS_KEY, connection, note_unreachable, reaching


def register(app: typer.Typer) -> None:
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

    from octavo.admin import Admin
    from octavo.explain.drawing import draw
    from octavo.explain.phases import choices_of, seconds_by_phase, spans_of

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
