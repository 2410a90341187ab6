"""`octavo chat` and `octavo complete`."""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from configs.sampling import PARAMETERS
from octavo.cli.flags import Connection, TlsFlags, reaching, separate
from octavo.lab.flags import with_flags

if TYPE_CHECKING:
    from octavo.client.constraints import Constraint
    from octavo.client.requests import SamplingParams

TARGETS = Annotated[
    list[str],
    typer.Option(
        "--target",
        metavar="HOST:PORT",
        help="A router. If you name several, comma-separated or in several flags, any of them may answer.",
    ),
]
MODEL = Annotated[str, typer.Option(help="The served model's name. Empty: the one that is served.")]
SYSTEM = Annotated[str, typer.Option(metavar="TEXT", help="A system message, sent before yours.")]
TIMEOUT = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="Time limit for the whole request. Default: none.")
]
VERBOSE = Annotated[
    bool, typer.Option("-v", "--verbose", help="Print the request's id on stderr, for `octavo explain`.")
]
PANEL = "Sampling (unset: the model's own defaults)"


def _sampling(help: str, metavar: str | None = None) -> typer.models.OptionInfo:
    return typer.Option(help=help, rich_help_panel=PANEL, show_default=False, metavar=metavar)


SEED = Annotated[int | None, _sampling("The same seed gives the same output.")]
MAX_TOKENS = Annotated[int | None, _sampling("Most output tokens.")]
IMAGE = Annotated[
    list[Path] | None,
    typer.Option("--image", metavar="FILE", help="An image, shown before your message. May be given several times."),
]
DRAFTS = Annotated[
    int | None,
    _sampling("Most draft tokens in a step of a cluster that speculates; 0: none. The answer is the same."),
]
STOP = Annotated[list[str] | None, _sampling("Stop before this text. May be given several times.")]
JSON_SCHEMA = Annotated[
    Path | None,
    _sampling("The answer is JSON that follows the schema in this file.", metavar="FILE"),
]
REGEX = Annotated[str | None, _sampling("The answer matches this regular expression.")]
CHOICE = Annotated[list[str] | None, _sampling("The answer is this text, or another one of several such flags.")]
IGNORE_EOS = Annotated[
    bool,
    typer.Option(
        "--ignore-eos", help="Continue to max_tokens, past the model's end-of-sequence token.", rich_help_panel=PANEL
    ),
]


def register(app: typer.Typer, group: str) -> None:
    for command in (chat, complete):
        app.command(rich_help_panel=group)(with_flags(_with_numbers(command)))


def _with_numbers(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces a command's **numbers, before `seed`, by a flag for each number of configs.sampling and the bound of
    drafts."""
    signature = inspect.signature(command)
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    place = list(signature.parameters).index("seed")
    flags = [
        inspect.Parameter(
            each.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=None,
            annotation=Annotated[each.kind | None, _sampling(each.doc)],
        )
        for each in PARAMETERS
    ]
    flags.append(
        inspect.Parameter(
            "num_speculative_tokens", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=DRAFTS
        )
    )

    @functools.wraps(command)
    def with_numbers(**given: Any) -> None:
        command(**given)

    with_numbers.__signature__ = signature.replace(parameters=[*own[:place], *flags, *own[place:]])  # type: ignore[attr-defined]
    return with_numbers


def _sampling_params(
    numbers: Mapping[str, float | None],
    seed: int | None,
    max_tokens: int | None,
    stop: list[str] | None,
    ignore_eos: bool,
    constraint: "Constraint | None",
) -> "SamplingParams":
    from octavo.client.requests import SamplingParams

    given = {name: value for name, value in numbers.items() if value is not None}
    return SamplingParams(
        seed=seed,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        constraint=constraint,
        **given,  # type: ignore[arg-type]
    )


def _constraint(json_schema: Path | None, regex: str | None, choice: list[str] | None) -> "Constraint | None":
    """Raises typer.BadParameter."""
    if json_schema is None and regex is None and not choice:
        return None
    from octavo.client.constraints import Constraint

    try:
        schema = None if json_schema is None else json_schema.read_text()
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"--json-schema={json_schema}: {error}") from None
    return Constraint(json=schema, regex=regex, choice=choice or None)


def chat(
    message: Annotated[str, typer.Argument(help="Your message to the model.", show_default=False)],
    target: TARGETS = ["localhost:50051"],  # noqa: B006 (typer copies it)
    system: SYSTEM = "",
    image: IMAGE = None,
    model: MODEL = "",
    timeout: TIMEOUT = None,
    verbose: VERBOSE = False,
    seed: SEED = None,
    max_tokens: MAX_TOKENS = None,
    stop: STOP = None,
    ignore_eos: IGNORE_EOS = False,
    json_schema: JSON_SCHEMA = None,
    regex: REGEX = None,
    choice: CHOICE = None,
    *,
    tls: TlsFlags,
    **numbers: float | None,
) -> None:
    """Send one chat message to a running cluster and stream the answer.

    Examples: [bold]octavo chat "What is the capital of France?" --temperature 0[/],
    [bold]octavo chat --image cat.jpg "What is this?"[/]
    """
    constraint = _constraint(json_schema, regex, choice)
    sampling = _sampling_params(numbers, seed, max_tokens, stop, ignore_eos, constraint)
    to = tls.connection()
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    content: str | list[Any] = message
    if image:
        for path in image:
            if not path.is_file():
                raise typer.BadParameter(f"--image={path}: there is no such file")
        content = [*({"type": "image", "image": path} for path in image), {"type": "text", "text": message}]
    _stream(target, [*messages, {"role": "user", "content": content}], sampling, model, timeout, to, verbose=verbose)


def complete(
    prompt: Annotated[str, typer.Argument(help="The text to continue, without a chat template.", show_default=False)],
    target: TARGETS = ["localhost:50051"],  # noqa: B006 (typer copies it)
    model: MODEL = "",
    timeout: TIMEOUT = None,
    verbose: VERBOSE = False,
    seed: SEED = None,
    max_tokens: MAX_TOKENS = 128,
    stop: STOP = None,
    ignore_eos: IGNORE_EOS = False,
    json_schema: JSON_SCHEMA = None,
    regex: REGEX = None,
    choice: CHOICE = None,
    *,
    tls: TlsFlags,
    **numbers: float | None,
) -> None:
    """Let a running cluster continue a text and stream what it adds.

    It adds at most 128 tokens, unless --max-tokens is given.

    Example: [bold]octavo complete "The capital of France is" --max-tokens 8[/]
    """
    constraint = _constraint(json_schema, regex, choice)
    sampling = _sampling_params(numbers, seed, max_tokens, stop, ignore_eos, constraint)
    to = tls.connection()
    _stream(target, prompt, sampling, model, timeout, to, verbose=verbose)


def _stream(
    targets: Sequence[str],
    prompt: str | list[dict[str, Any]],
    sampling: "SamplingParams",
    model: str,
    timeout: float | None,
    to: Connection,
    *,
    verbose: bool,
) -> None:
    from octavo.client.results import Delta, Finished, Started
    from octavo.client.sync_client import Client

    targets = separate(targets)
    with reaching(*targets), Client(targets, retry_for=0.0, **to) as client:
        client.model(model)
    with (
        Client(targets, timeout=timeout, **to) as client,
        client.stream(prompt, sampling, model=model) as stream,
    ):
        for event in stream:
            if isinstance(event, Started) and verbose:
                print(f"(request {event.request_id})", file=sys.stderr, flush=True)
            elif isinstance(event, Delta):
                print(event.text, end="", flush=True)
            elif isinstance(event, Finished):
                usage = event.usage
                print()
                choice = stream.generation.choices[0]
                print(
                    f"({usage.prompt_tokens} prompt tokens, {usage.cached_tokens} of them cached, "
                    f"{usage.completion_tokens} output tokens; ended by {choice.finish_reason})",
                    file=sys.stderr,
                )
