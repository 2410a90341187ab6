"""The entry point of the `octavo` command."""

import inspect
import re
import sys
from collections.abc import Callable

import typer

import runtime.grpc_setup.quiet  # noqa: F401 (before grpc)
from configs.load import ConfigError
from octavo.cli import admin, bench, call, machine, plan, replay, run_batch, tune, up
from octavo.client.errors import OctavoError
from octavo.cluster.errors import ClusterError
from runtime.hub.errors import HubError
from runtime.model_files import ModelNotFoundError

USAGE_ERROR = 2
FAILURE = 1

app = typer.Typer(
    name="octavo",
    help="Serve large language models on one machine or many, and talk to them.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# The panels of `octavo --help`, in order: what a user wants to do, and the commands for it.
GROUPS: dict[str, tuple[Callable[[typer.Typer, str], None], ...]] = {
    "Serve a model": (up.register, machine.register_pull, machine.register_doctor),
    "Ask a model": (call.register, run_batch.register),
    "Look inside": (admin.register_top, admin.register_explain, replay.register, machine.register_version),
    "Measure and plan": (bench.register, tune.register, plan.register),
    "Operate a cluster": (admin.register_migrate, admin.register_cache, machine.register_keys),
}
for group, registers in GROUPS.items():
    for register in registers:
        register(app, group)


def _unwrap(commands: typer.Typer) -> None:
    """Joins the lines of each paragraph of help: typer would break them where the docstring does."""
    for command in commands.registered_commands:
        command.help = re.sub(r"(?<=\S)\n(?=\S)", " ", inspect.getdoc(command.callback) or "")
    for subcommands in commands.registered_groups:
        assert subcommands.typer_instance is not None
        _unwrap(subcommands.typer_instance)


_unwrap(app)


def main() -> None:
    """Runs the command line; a foreseen error is one message, without a traceback."""
    try:
        app()
    except (ConfigError, ModelNotFoundError) as error:
        _fail(error, USAGE_ERROR)
    except (ClusterError, HubError, OctavoError) as error:
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
