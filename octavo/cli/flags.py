"""Flags that several commands share: one for each option, made from its definition, and the flags for connecting to
a cluster.
"""

import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, get_args, get_origin

import annotated_types
import typer
from pydantic.fields import FieldInfo

from configs.load import ConfigError
from configs.options import Options
from configs.vllm_names import NAMES, SHORT_FLAGS, SWITCHES
from octavo.client.errors import Unavailable
from octavo.lab.flags import flag
from octavo.lab.settings import GivenOptions

if TYPE_CHECKING:
    import ssl

    import grpc

# Lets --max_num_seqs stand for --max-num-seqs.
SNAKE_CASE_FLAGS = {"token_normalize_func": lambda flag: flag.replace("_", "-")}

CONFIG_FLAG = Annotated[
    Path | None,
    typer.Option(
        "-c",
        "--config",
        help="YAML file of options, such as configs/local.yaml. Flags and OCTAVO_... variables override it.",
    ),
]


def with_option_flags(command: Callable[..., Any], names: Collection[str] = Options.model_fields) -> Callable[..., Any]:
    """Adds a flag for each option in `names` (default: all) to a command that takes them as `**flags`."""
    signature = inspect.signature(command)
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    clashes = {p.name for p in own} & set(names)
    assert not clashes, f"parameters that are options too: {clashes}"
    flags = [_flag(name, info) for name, info in Options.model_fields.items() if name in names]
    if names is Options.model_fields:
        # Refused by the name that users of vLLM know, with what to use instead.
        flags += map(_foreign_flag, NAMES)
    command.__signature__ = signature.replace(parameters=own + flags)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in own + flags}
    return command


def given_options(config: Path | None, flags: dict[str, Any]) -> GivenOptions:
    return GivenOptions(config=config, flags={name: value for name, value in flags.items() if value is not None})


def options_from_flags(config: Path | None, flags: dict[str, Any]) -> Options:
    """The options from the file, the environment and the flags that were given. Raises ConfigError."""
    return given_options(config, flags).options()


@contextlib.contextmanager
def plan_packages(command: str) -> Iterator[None]:
    """Says how to install the packages of a command whose import fails. Raises ConfigError."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(f"{command} needs the package {error.name}: pip install 'octavo[plan]'") from None


@contextlib.contextmanager
def resumable(folder: Path) -> Iterator[None]:
    """Tells after Ctrl-C that nothing is lost."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"what was measured is kept in {folder}; the same command goes on from there", err=True)
        raise


def _flag(name: str, info: FieldInfo) -> inspect.Parameter:
    assert isinstance(info.json_schema_extra, dict)
    kind = _plain_type(info.annotation)
    long = "--" + name.replace("_", "-")
    declarations = [f"{long}/--no-{long[2:]}" if kind is bool else long, *filter(None, [SHORT_FLAGS.get(name)])]
    # The backslash keeps rich from taking octavo[otel] for markup.
    description = (info.description or "").replace("[", r"\[")
    option = typer.Option(
        *declarations,
        help=f"{description} {_range_and_default(info)}",
        rich_help_panel=str(info.json_schema_extra["group"]),
        metavar=None if kind is bool else _metavar(kind),
        show_default=False,
    )
    # Values stay text: configs.load checks all values in one place, wherever they come from.
    annotation = Annotated[(bool if kind is bool else str) | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _foreign_flag(name: str) -> inspect.Parameter:
    """A hidden flag of vLLM's, for configs.load to refuse."""
    kind = bool if name in SWITCHES else str
    option = typer.Option(f"--{name.replace('_', '-')}", hidden=True, show_default=False)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _plain_type(annotation: Any) -> Any:
    """Strips Annotated."""
    if get_origin(annotation) is Annotated:
        return _plain_type(get_args(annotation)[0])
    return annotation


def _metavar(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        return "A,B,..."
    return {int: "INTEGER", float: "NUMBER", Path: "PATH"}.get(kind, "TEXT")


def _range_and_default(info: FieldInfo) -> str:
    low = high = ""
    for bound in info.metadata:
        match bound:
            case annotated_types.Ge(ge=value):
                low = f"from {value:,}"
            case annotated_types.Gt(gt=value):
                low = f"above {value:,}"
            case annotated_types.Le(le=value):
                high = f"up to {value:,}"
    default = info.get_default(call_default_factory=True, validated_data={})
    if isinstance(default, bool):
        default = "on" if default else "off"
    elif isinstance(default, tuple):
        default = ",".join(map(str, default))
    parts = [f"default {default}" if default != "" else "", " ".join(filter(None, (low, high)))]
    return f"[dim]({'; '.join(filter(None, parts))})[/]" if any(parts) else ""


JSON = Annotated[
    bool, typer.Option("--json", help="Print one JSON object per line, for programs, and no progress bar.")
]


def parse_counts(
    text: str, flag: str, wanted: str = "a list of numbers above 0, as in 1,8", *, count: int | None = None
) -> list[int]:
    """Parses numbers above 0 with commas. count: how many there must be. Raises typer.BadParameter."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts) or count not in (None, len(parts)):
        raise typer.BadParameter(f"{text!r} is not {wanted}", param_hint=flag)
    return [int(part) for part in parts]


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


TARGET = Annotated[str, typer.Option(metavar="HOST:PORT", help="A router, or one scheduler.")]
# Only from the environment: every user of a machine can see the flags of its processes.
API_KEY = "OCTAVO_API_KEY"
_CONNECTION = "Connection"


class Connection(TypedDict):
    """The arguments that all clients take."""

    api_key: str
    credentials: "grpc.ChannelCredentials | None"


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFlags:
    """The flags of a connection, as given."""

    tls: bool = flag(False, _CONNECTION, "Use TLS and trust the CAs that gRPC trusts.", "--tls")
    tls_ca: str | None = flag(None, _CONNECTION, "Use TLS and trust these CAs (PEM).", metavar="FILE")
    tls_cert: str | None = flag(
        None, _CONNECTION, "Your certificate, if the server asks for one (PEM).", metavar="FILE"
    )
    tls_key: str | None = flag(None, _CONNECTION, "The private key of your certificate (PEM).", metavar="FILE")

    def connection(self) -> Connection:
        """Reads the connection's arguments from flags and the environment. Raises typer.BadParameter."""
        credentials = None
        if self.tls or self.tls_ca or self.tls_cert or self.tls_key:
            from octavo.client.connection import tls_credentials  # imports gRPC, which `--help` does not need

            with self._named():
                credentials = tls_credentials(self.tls_ca, self.tls_cert, self.tls_key)
        return Connection(api_key=api_key(), credentials=credentials)

    def context(self) -> "ssl.SSLContext | None":
        """Returns what HTTPS needs beyond the usual CAs; None: nothing. Raises typer.BadParameter."""
        if not (self.tls_ca or self.tls_cert or self.tls_key):
            return None
        import ssl

        with self._named():
            context = ssl.create_default_context(cafile=self.tls_ca)
            if self.tls_cert or self.tls_key:
                if not (self.tls_cert and self.tls_key):
                    raise ValueError("only one of the certificate and its key is given: give both, or neither")
                context.load_cert_chain(self.tls_cert, self.tls_key)
        return context

    @staticmethod
    @contextlib.contextmanager
    def _named() -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            raise typer.BadParameter(f"--tls-ca, --tls-cert, --tls-key: {error}") from None


def api_key() -> str:
    return os.environ.get(API_KEY, "")


def separate(targets: Iterable[str]) -> list[str]:
    """Splits the values of a flag that may be repeated or comma-separated. Raises typer.BadParameter."""
    found = [part.strip() for target in targets for part in target.split(",") if part.strip()]
    if not found:
        raise typer.BadParameter("--target is empty: give HOST:PORT of a router")
    return found


@contextlib.contextmanager
def reaching(*targets: str) -> Iterator[None]:
    """Adds to Unavailable what to do about it."""
    try:
        yield
    except Unavailable as error:
        raise Unavailable(
            f"no cluster is ready at {' or '.join(targets)} ({error}): start one with `octavo up`, or name another "
            f"with --target"
        ) from None


def note_unreachable(replicas: Iterable[str]) -> None:
    """Warns on stderr that the answer is not from all replicas."""
    for replica in replicas:
        print(f"octavo: not reached: {replica}", file=sys.stderr)
