"""`octavo migrate`."""

from typing import Annotated

import typer

from octavo.cli.target import TARGET, TLS, TLS_CA, TLS_CERT, TLS_KEY, connection, reaching


def register(app: typer.Typer) -> None:
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
    from octavo.admin import Admin

    connected = connection(tls, tls_ca, tls_cert, tls_key)
    with reaching(target), Admin(target, **connected) as admin:
        done = admin.migrate(request_id, to)
    typer.echo(f"moved after {done.num_output_tokens:,} output tokens, from {done.moved_from} to {done.moved_to}")
