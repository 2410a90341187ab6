"""`octavo replay`."""

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from scheduler.recording.replay import Difference, Replayed

_DIFFERS = 1
_UNREADABLE = 2


def register(app: typer.Typer, group: str) -> None:
    app.command(rich_help_panel=group)(replay)


def replay(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="The files of one trace or more, in any order, such as FILE and FILE.1.",
            show_default=False,
        ),
    ],
    request_id: Annotated[
        str, typer.Option("--explain", metavar="ID", help="Also show what happened to this request.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per file, for programs.")] = False,
) -> None:
    """Replay a trace and check that the scheduler plans the same steps.

    `octavo up --trace FILE` records traces; replaying one needs no model and no cluster. Exits with 0 if every plan is
    equal, with 1 at the first that differs, after saying where, and with 2 if a file is not a trace or is damaged.

    Example: [bold]octavo replay run.0.trace.1 run.0.trace[/]
    """
    from octavo.reports import progress_bar
    from scheduler.recording import replay as replaying
    from scheduler.recording.records import RecordingError

    began = time.perf_counter()
    try:
        num_bytes = sum(path.stat().st_size for path in files if path.is_file())
        with progress_bar("bytes", num_bytes, hidden=as_json) as advance:
            outcomes = replaying.replay(files, explain=request_id or None, on_progress=advance)
    except RecordingError as error:
        typer.echo(f"octavo: {error}", err=True)
        raise typer.Exit(_UNREADABLE) from None
    seconds = time.perf_counter() - began
    for outcome in outcomes:
        if as_json:
            print(json.dumps(_as_dict(outcome)))
        else:
            _print(outcome)
    difference = outcomes[-1].difference
    if difference is None and not as_json:
        num_plans = sum(outcome.num_plans for outcome in outcomes)
        typer.echo(f"every plan is equal: {num_plans:,} in {seconds:.1f} s, {num_plans / seconds:,.0f} per second")
    if request_id and not as_json:
        _explain(request_id, outcomes)
    if difference is not None:
        raise typer.Exit(_DIFFERS)


def _as_dict(outcome: "Replayed") -> dict[str, object]:
    import msgspec

    return msgspec.to_builtins(outcome, enc_hook=str) | {"equal": outcome.difference is None}


def _print(outcome: "Replayed") -> None:
    origin = outcome.origin
    began = datetime.fromtimestamp(origin.unix_time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    typer.echo(f"{outcome.path}: replica {origin.replica}, from {began}, Octavo {origin.octavo_version}")
    typer.echo(
        f"  {outcome.seconds:.1f} s: {outcome.num_requests:,} requests, {outcome.num_calls:,} calls, "
        f"{outcome.num_plans:,} plans of {outcome.num_tokens:,} tokens, {outcome.num_preemptions:,} preemptions, "
        f"workers lost {outcome.num_epochs_lost} times"
    )
    if outcome.num_torn_bytes:
        typer.echo(f"  its last {outcome.num_torn_bytes} bytes are part of a truncated record and were not replayed")
    if outcome.difference is not None:
        _print_difference(outcome.difference)


def _print_difference(difference: "Difference") -> None:
    typer.echo(f"  step {difference.step}, {difference.time:.6f} s after the first call: {difference.field} differs")
    typer.echo(f"    in the trace  {difference.expected}")
    typer.echo(f"    replayed      {difference.got}")
    typer.echo("  the calls up to that step:")
    for call in difference.calls:
        typer.echo(f"    {call}")


def _explain(request_id: str, outcomes: "list[Replayed]") -> None:
    from rich.console import Console

    from octavo.client.admin import RequestTimeline
    from octavo.timeline import draw
    from scheduler.admin import timeline_message

    console = Console()
    found = [(timeline, outcome) for outcome in outcomes for timeline in outcome.timelines]
    if not found:
        typer.echo(f"octavo: no request in these traces has the id {request_id!r}", err=True)
    for timeline, outcome in found:
        message = timeline_message(timeline, str(outcome.origin.replica), outcome.now)
        console.print()
        draw(RequestTimeline.from_proto(message), console)
