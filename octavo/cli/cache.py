"""`octavo cache`."""

import typer

from octavo.cli.target import TARGET, TLS, TLS_CA, TLS_CERT, TLS_KEY, connection, note_unreachable, reaching


def register(app: typer.Typer) -> None:
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
    from octavo.admin import Admin

    to = connection(tls, tls_ca, tls_cert, tls_key)
    with reaching(target), Admin(target, **to) as admin:
        reset = admin.reset_prefix_cache()
    note_unreachable(reset.unreachable)
    typer.echo(f"{reset.num_blocks:,} KV blocks were cached and can't be found any more")
