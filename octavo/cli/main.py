"""The entry point of the `octavo` command."""

import sys

import typer

import runtime.quiet_grpc  # noqa: F401 (before grpc)
from configs.load import ConfigError
from octavo.cli import admin, bench, call, keys, plan, replay, up, version
from octavo.client.errors import OctavoError
from octavo.cluster.errors import ClusterError
from runtime.model_files import ModelNotFoundError

USAGE_ERROR = 2
FAILURE = 1

app = typer.Typer(
    name="octavo",
    help="Serve large language models over gRPC, and talk to them.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for register in (
    up.register, call.register, admin.register_explain, admin.register_migrate, admin.register_cache, bench.register,
    plan.register, replay.register, keys.register, version.register,
):  # fmt: skip
    register(app)


def main() -> None:
    """Runs the command line; a foreseen error is one message, without a traceback."""
    try:
        app()
    except (ConfigError, ModelNotFoundError) as error:
        _fail(error, USAGE_ERROR)
    except (ClusterError, OctavoError) as error:
        _fail(error, FAILURE)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # `octavo chat ... | head`: the reader has seen enough.
        sys.stderr.close()
        sys.exit(FAILURE)


def _fail(error: Exception, code: int) -> None:
    print(f"octavo: {error}", file=sys.stderr)
    sys.exit(code)
