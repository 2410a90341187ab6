"""Fuzzes the edges: malformed messages for the code that reads them, and for live servers.

    python -m benchmarks.fuzz [--messages 100000] [--edge NAME ...] [--seed S] [--json] [--failures DIR]
    python -m benchmarks.fuzz --edge NAME --replay FILE

Half of the messages have hostile fields, half have bytes changed anywhere, some both. An edge may raise only the errors
that it documents, no message may take longer than 5 s, memory must stay within 64 MiB of its level after the first
tenth, and before and after the run a good message must get its answer. Exits 1 if any of this fails; the message is
then in DIR, and --replay feeds it to a fresh edge. The same seed gives the same messages. --engine atheris lets
coverage guide the changes, for one edge; it needs octavo[fuzz].
"""

import argparse
import asyncio
import json
import logging
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

import runtime.grpc_setup.quiet  # noqa: F401 (before grpc)
from benchmarks.fuzz.edge import Kind, Outcome, fuzz
from benchmarks.fuzz.guided import run_guided


def main() -> int:
    parser = argparse.ArgumentParser(description="Malformed messages for every edge.")
    parser.add_argument("--messages", type=int, default=100_000, help="messages for each edge")
    parser.add_argument("--edge", action="append", help="an edge to fuzz; default: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="a line for each edge")
    parser.add_argument("--failures", type=Path, default=Path("fuzz-failures"), help="where failing messages are kept")
    parser.add_argument("--replay", type=Path, help="file of a message that failed")
    parser.add_argument("--engine", choices=("mutation", "atheris"), default="mutation")
    arguments = parser.parse_args()
    if arguments.engine == "atheris":
        if len(arguments.edge or ()) != 1:
            parser.error("--engine atheris takes one --edge")
        logging.getLogger().handlers[:] = [logging.NullHandler()]
        return run_guided(arguments.edge[0], arguments.messages, arguments.seed)
    # Not at the top: run_guided must be the first to import the code that it instruments.
    from benchmarks.fuzz.edges import KINDS

    for name in arguments.edge or ():
        if name not in KINDS:
            parser.error(f"--edge {name}: must be one of {', '.join(KINDS)}")
    kinds = [KINDS[name] for name in arguments.edge or KINDS]
    if arguments.replay is not None:
        logging.basicConfig(level=logging.INFO)
        for kind in kinds:
            print(asyncio.run(_replay(kind, arguments.replay.read_bytes())))
        return 0
    # Drops what the edges log about each message.
    logging.getLogger().handlers[:] = [logging.NullHandler()]
    outcomes: list[Outcome] = []
    for kind in kinds:
        outcome = asyncio.run(_run(kind, arguments.messages, arguments.seed))
        outcomes.append(outcome)
        if arguments.json:
            print(json.dumps(_as_dict(outcome)), flush=True)
        if outcome.failure:
            _keep(outcome, arguments.failures)
    if not arguments.json:
        _show(outcomes)
    return int(any(outcome.failure for outcome in outcomes))


async def _run(kind: Kind, num_messages: int, seed: int) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="fuzz-") as directory:
        async with kind.opened(Path(directory)) as edge:
            outcome = await fuzz(kind, edge, num_messages, seed)
    if not outcome.failure and outcome.most_held_s > kind.most_held_s > 0:
        outcome.failure = f"the event loop was held for {outcome.most_held_s:.3f} s, more than {kind.most_held_s:g}"
    return outcome


async def _replay(kind: Kind, message: bytes) -> str:
    with tempfile.TemporaryDirectory(prefix="fuzz-") as directory:
        async with kind.opened(Path(directory)) as edge:
            await edge.check()
            became = await edge.feed(message)
            await edge.check()
            return f"{kind.name}: {became}"


def _keep(outcome: Outcome, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{outcome.edge}-{outcome.seed}-{outcome.num_messages}"
    path.write_bytes(outcome.message)
    print(
        f"{outcome.edge}: {outcome.failure}\n"
        f"  after {outcome.num_messages} messages of --seed {outcome.seed}; the last one is in {path}",
        file=sys.stderr,
    )


def _as_dict(outcome: Outcome) -> dict[str, object]:
    return {
        "edge": outcome.edge,
        "seed": outcome.seed,
        "messages": outcome.num_messages,
        "seconds": round(outcome.seconds, 1),
        "slowest_s": round(outcome.slowest_s, 3),
        "most_held_s": round(outcome.most_held_s, 3),
        "rss_mib": round(outcome.rss_mib),
        "peak_mib": round(outcome.peak_mib),
        "became": dict(outcome.became.most_common()),
        "failure": outcome.failure,
    }


def _show(outcomes: list[Outcome]) -> None:
    table = Table("edge", "messages", "s", "slowest ms", "held ms", "MiB more", "what became of them", box=None)
    for each in outcomes:
        became = ", ".join(f"{count:,} {what}" for what, count in each.became.most_common(5))
        table.add_row(
            each.edge,
            f"{each.num_messages:,}",
            f"{each.seconds:.0f}",
            f"{each.slowest_s * 1000:.0f}",
            f"{each.most_held_s * 1000:.0f}" if each.most_held_s else "",
            f"{each.peak_mib - each.rss_mib:.0f}",
            f"[red]{each.failure}[/]" if each.failure else became,
        )
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
