"""Injects faults into a cluster that works, and checks what became of the work.

    python -m benchmarks.faults --streams 300 --faults 20
    python -m benchmarks.faults --traffic structured --streams 100 --faults 12
    python -m benchmarks.faults --kinds grey --faults 310 --streams 300 --tokens 30
    python -m benchmarks.faults --kinds stop-worker,clock --faults 4 --seed 7 --json
    python -m benchmarks.faults --kinds rank --faults 3 --stages 1 --tensor 3
    python -m benchmarks.faults --traffic clients --minutes 10 --kinds kill,grey
    python -m benchmarks.faults --traffic batches --faults 8
    python -m benchmarks.faults --traffic programs --programs python,node

`octavo up` with two routers and two replicas of two pipeline stages each, unless flags say otherwise. The kinds:

  kill  processes are killed with -9, some two at once; kill-worker and others are one of these alone
  rank  a rank is killed in the middle of a step: the others must leave it within 5 s
  grey  all kinds that kill nothing: processes are stopped, slow, or out of disk, descriptors, memory or time, and the
        network between them, tcp through relays, is broken; also by the beginning of a name, as net or stop

A limit of memory needs root, a clock that can be set needs gcc; without root a full disk is a limit on the size of
files. Kinds that the machine lacks something for are left out, and named. The traffics:

  plain, structured, attached, images, drafts, model-drafts
            streams; each must give what it gives undisturbed, to the bits of its logprobs, and structured ones and
            those with drafts also what was asked for: constraints, calls of tools. Attached ones outlive their
            connections, which are cut. drafts: replicas that draft from n-grams and suffixes; model-drafts: by the
            model itself in 4 bits and by an EAGLE-3 head
  clients   requests of good and bad clients, image-clients with images: afterwards nothing may be left over
  batches   `octavo run-batch` and /v1/batches: each line must be written once
  programs  octavo-client alone in an empty environment, and the programs of docs/clients; they say when to kill

Also no process may be replaced that the fault gives no reason to replace. Exits with 1 if anything is not as it must
be.
"""

import argparse
import asyncio
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.faults.driver import Fault, Report, Say, Traffic, injections, run
from benchmarks.faults.ground import FLAGS, Ground, OwnFlags, Shape, standing
from benchmarks.faults.kinds import FAULTS, GREY
from benchmarks.faults.kinds.kills import choose_kills
from benchmarks.faults.traffics import STREAMS
from benchmarks.faults.traffics.batches import Batches
from benchmarks.faults.traffics.clients import CLIENT_FLAGS, IMAGE_CLIENT_FLAGS, Clients
from benchmarks.faults.traffics.images import tiny_model
from benchmarks.faults.traffics.programs import NAMES, PROGRAM_FLAGS, Programs
from benchmarks.faults.traffics.streams import Streams

_KILL = "kill"
_FLAGS = {"clients": CLIENT_FLAGS, "image-clients": IMAGE_CLIENT_FLAGS, "batches": FLAGS, "programs": PROGRAM_FLAGS}


def choose_faults(kinds: Sequence[str], count: int | None, choose: random.Random) -> Iterable[Fault]:
    """Returns so many faults of these kinds, each in turn; None: without an end, at random. Raises ValueError for a
    kind that is none."""
    if kinds == [_KILL] and count is not None:
        return choose_kills(count, choose)
    found: list[list[Fault]] = []
    for kind in kinds:
        names = GREY if kind == "grey" else [name for name in FAULTS if name == kind or name.startswith(f"{kind}-")]
        if not names:
            raise ValueError(f"--kinds: {kind}: there are grey, and {', '.join(FAULTS)}")
        found.append([FAULTS[name] for name in names if not FAULTS[name].missing()])
    if count is None:
        return (choose.choice(choose.choice(found)) for _ in itertools.count())
    return itertools.islice(itertools.cycle(itertools.chain(*found)), count)


def _left_out(kinds: Sequence[str]) -> Iterator[str]:
    if any(kind != _KILL for kind in kinds):
        yield from (f"{fault.name} is left out: {why}" for fault in GREY.values() if (why := fault.missing()))


def _traffic(arguments: argparse.Namespace, ground: Ground, seed: int, say: Say) -> Traffic:
    faults, tokens = arguments.faults, arguments.tokens
    match arguments.traffic:
        case "clients" | "image-clients":
            has_images = arguments.traffic == "image-clients"
            seconds, count = 60 * arguments.minutes, arguments.clients
            return Clients(ground, say, seconds=seconds, num_clients=count, seed=seed, has_images=has_images)
        case "batches":
            return Batches(
                ground, say, num_lines=arguments.lines, num_tokens=tokens or 32, num_faults=faults, seed=seed
            )
        case "programs":
            return Programs(ground, say, arguments.programs)
        case name:
            kind = STREAMS[name]
            plans = kind.make(arguments.streams, seed, tokens or kind.tokens)
            return Streams(ground, say, kind, plans, num_faults=faults, seed=seed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--traffic", choices=(*STREAMS, *_FLAGS), default="plain")
    add("--kinds", default=_KILL, help=f"comma-separated; default: %(default)s. {', '.join(FAULTS)}")
    add("--faults", type=int, help="default: 20, or 8 of batches; clients have them for 0.7 of their time")
    add("--longest", type=float, default=60.0, help="seconds that no fault exceeds")
    add("--streams", type=int, default=300)
    add("--tokens", type=int, help="of a choice, on average; structured and batches: at most; default: by traffic")
    add("--minutes", type=float, default=10.0, help="of clients")
    add("--clients", type=int, default=16, help="concurrent ones")
    add("--lines", type=int, default=500, help="of a batch")
    add("--programs", default=",".join(NAMES), help="comma-separated; default: %(default)s")
    add("--stages", type=int, help="of a replica; default: 2, or 1 for programs")
    for name, default in (("replicas", 2), ("tensor", 1), ("routers", 2)):
        add(f"--{name}", type=int, default=default, help="of the cluster; default: %(default)s")
    add("--seed", type=int, help="of traffic and faults; default: a random one, which is printed")
    add("--log", type=Path, help="file for the cluster's output")
    add("--json", action="store_true", help="one line")
    return parser


def main() -> int:
    parser = _parser()
    arguments = parser.parse_args()
    name, seed, began = arguments.traffic, arguments.seed, time.monotonic()
    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    arguments.programs = list(filter(None, arguments.programs.split(",")))
    if unknown := set(arguments.programs) - set(NAMES):
        parser.error(f"--programs: {', '.join(sorted(unknown))}: there are {', '.join(NAMES)}")
    if arguments.faults is None:
        arguments.faults = 8 if name == "batches" else 20
    if arguments.stages is None:
        arguments.stages = 1 if name == "programs" else 2
    kinds, is_endless = arguments.kinds.split(","), name in ("clients", "image-clients")
    try:
        faults = choose_faults(kinds, None if is_endless else arguments.faults, random.Random(f"{seed}/kinds"))
    except ValueError as error:
        parser.error(str(error))
    # Programs say themselves when to kill.
    faults = () if name == "programs" else faults
    drawn = injections(faults, seed, longest=arguments.longest)
    is_grey = any(kind not in (_KILL, "rank") for kind in kinds)

    def say(text: str) -> None:
        if not arguments.json:
            print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True)

    say(f"seed {seed}")
    for text in _left_out(kinds):
        say(text)
    shape = Shape(
        replicas=arguments.replicas, stages=arguments.stages, tensor=arguments.tensor, routers=arguments.routers
    )

    async def disturb(ground: Ground) -> Report:
        return await run(ground, _traffic(arguments, ground, seed, say), drawn, seed)

    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        flags, (more, own) = _equipped(name, directory)
        means = {"has_means": is_grey, "has_weights": is_grey and name not in ("images", "image-clients")}
        with standing(directory, *flags, *more, shape=shape, own_flags=own, **means) as ground:
            say(f"{len(ground.cluster.places())} processes serve")
            try:
                report = asyncio.run(disturb(ground))
            finally:
                if arguments.log:
                    arguments.log.write_text(ground.cluster.up.output)
    print(json.dumps({"seed": seed, **report.as_json()}) if arguments.json else report)
    return 0 if report.is_clean else 1


def _equipped(name: str, directory: Path) -> tuple[Sequence[str], tuple[Sequence[str], OwnFlags]]:
    if name == "image-clients":
        return IMAGE_CLIENT_FLAGS, tiny_model(directory)
    return (STREAMS[name].flags, STREAMS[name].equip(directory)) if name in STREAMS else (_FLAGS[name], ((), {}))


if __name__ == "__main__":
    sys.exit(main())
