"""Kills processes of a cluster with -9 while streams run: each stream must give what it gives undisturbed.

    python -m benchmarks.faults.chaos --streams 300 --kills 20
    python -m benchmarks.faults.chaos --streams 24 --kills 3 --seed 7 --json
    python -m benchmarks.faults.chaos --structured --streams 100 --kills 12
    python -m benchmarks.faults.chaos --speculation --streams 200 --kills 8
    python -m benchmarks.faults.chaos --speculation workers --streams 200 --kills 6
    python -m benchmarks.faults.chaos --images --streams 60 --kills 6
    python -m benchmarks.faults.chaos --attach --streams 100 --kills 8
    python -m benchmarks.faults.chaos --grey --streams 300 --times 10 --tokens 30
    python -m benchmarks.faults.chaos --grey --kinds stop-worker,clock --times 2 --results FILE

`octavo up` with two routers and two replicas, of two pipeline stages each (--stages). Half of the streams are sampled,
half of these with a seed of the client's; the others are asked once more with the seed that their routers chose. Some
streams begin at once, the rest with the kills, so that each kill hits streams in mid-flight. A process is killed at a
random moment after the previous one serves again: a router has answered a request, a replica is ready at both routers
and has computed a token. Before each kill, and while its victims are away, some streams are migrated to the other
replica. Exits with 1 if a stream failed or differs in any bit from its undisturbed run, and names the first different
token of each such stream.

With --structured the streams are constrained (JSON schema, regular expression, choice, grammar) or call tools, and so
few KV blocks are there that some are preempted. What clients get is also compared with the constraint, the schemas of
the tools, and what the parser makes of the whole text at once: no call and no delta may come twice.

With --speculation the replicas draft in different ways, one from n-grams, one from suffixes; with --speculation workers
one by the model itself in 4 bits, one by an EAGLE-3 head of random weights. Streams are of all kinds,
a third of them gives back a text; few KV blocks are there. The undisturbed streams ask for no drafts.

With --images each stream has one to three images between texts, some of them images of other streams, too. The model
is a tiny Qwen2.5-VL with random weights, which needs transformers to be written. Few KV blocks are there, and the
encoder's cache holds few images.

With --attach the streams outlive their connections (detach_timeout), half of them over gRPC, half over HTTP as events.
Each is read in parts: connections are cut after a few messages, and the next one goes to any router. What no router
holds, because its router died, is resumed over gRPC, and asked for again over HTTP.

With --grey the faults kill nothing: processes are stopped, slow, or out of disk, descriptors, memory or time, and the
network between them, tcp through relays, is broken. Each kind is injected so many times; then all its streams are
compared. All kinds ten times take an hour or more; --results continues where an earlier run ended. Exits with 1 also if
a process was replaced that the fault gives no reason to replace. A limit of memory needs root, a clock that can be set
needs gcc; without root a full disk is a limit on the size of files.
"""

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults.cluster import Cluster, Kind
from benchmarks.faults.command import FLAGS, NUM_ROUTERS, NUM_STAGES, Plain, Say, add_arguments, plain, run_command
from benchmarks.faults.crowd import Crowd, Difference, Outcome, Plan, differences, make_plans
from benchmarks.faults.grey.command import add_grey_arguments, run_grey
from benchmarks.faults.kills import Kill, Killer, Mover, choose_kinds, choose_victims
from benchmarks.faults.streams.attached.crowd import AttachedCrowd
from benchmarks.faults.streams.attached.plans import attached_differences, make_attached_plans
from benchmarks.faults.streams.images import image_cluster, make_image_plans
from benchmarks.faults.streams.speculation.plans import (
    DRAFTERS,
    command,
    make_speculated_plans,
    without_speculation,
)
from benchmarks.faults.streams.structured import plans as structured
from benchmarks.faults.streams.structured.checks import breaches
from octavo.client.admin import Admin
from octavo.client.results import FinishReason
from tests.support.ports import free_ports

# Before each kill, live streams get at most this share of their outstanding tokens, so that the kill can lose some.
_LARGEST_SHARE = 0.3
_MOST_TOKENS = 300
_MOST_SECONDS = 0.2
# With fewer live streams, more are started before the kill.
_FEWEST_LIVE = 8
# Before each kill, and again while its victims are away.
_NUM_MOVES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class KindCounts:
    """Counts of the streams of one kind. num_stopped: choices that ended by themselves; num_calls: of tools."""

    num_streams: int
    num_sampled: int
    num_equal: int
    num_choices: int
    num_stopped: int
    num_calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result. undisturbed_s: seconds of the streams with a seed, alone; disturbed_s: of all streams, with kills."""

    num_streams: int
    num_equal: int
    differences: list[Difference]
    # Outputs, also undisturbed ones, that are not what their requests ask for.
    breaches: list[Difference]
    kinds: dict[str, KindCounts]
    kills: list[Kill]
    undisturbed_s: float
    disturbed_s: float
    resumes_by_clients: int
    resubmissions_by_routers: int
    preemptions: int
    inexact: int
    # Speculation of the disturbed streams, as their usages tell it.
    draft_tokens: int
    accepted_draft_tokens: int
    # With --attach: how often readers did what.
    reading: dict[str, int]

    @property
    def is_clean(self) -> bool:
        all_equal = self.num_equal == self.num_streams and not self.breaches and not self.inexact
        return all_equal and all(kill.num_begun for kill in self.kills)

    @property
    def num_moved(self) -> int:
        return sum(kill.num_moved for kill in self.kills)


async def run_chaos(
    cluster: Cluster,
    plans: Sequence[Plan],
    kills: Sequence[tuple[Kind, ...]],
    seed: int,
    *,
    say: Say,
    num_moves: int = _NUM_MOVES,
    check: Callable[[Outcome], list[Difference]] = lambda _: [],
    reference: Callable[[Plan], Plan] = lambda plan: plan,
    crowd_of: Callable[[Sequence[Plan]], Crowd] | None = None,
    compare: Callable[[Outcome, Outcome], list[Difference]] = differences,
) -> Report:
    """Runs streams and kills on a cluster that serves.

    kills: the kinds of process that each kill ends. say: gets a line about each event. num_moves: streams to migrate
    before each kill, and again while its victims are away. check: returns what is wrong with an output by itself.
    reference: returns the stream to ask for undisturbed. crowd_of: makes the crowd that is disturbed. compare: compares
    a stream's outcome with the undisturbed one.
    """
    num_streams = len(plans)
    began = time.monotonic()
    expected = await _ask_all(cluster, [reference(plan) for plan in plans if plan.has_seed])
    undisturbed_s = time.monotonic() - began
    say(f"{len(expected)} streams, undisturbed, took {undisturbed_s:.1f} s")
    began = time.monotonic()
    async with crowd_of(plans) if crowd_of else Crowd(cluster.targets, plans) as crowd:
        choose = random.Random(f"{seed}/victims")
        killer, killed = await _kill_all(cluster, crowd, num_streams, kills, num_moves, choose, say)
        outcomes = await crowd.finish()
    disturbed_s = time.monotonic() - began
    say(f"all {num_streams} streams, disturbed, took {disturbed_s:.1f} s")
    counters = await killer.counters()
    # The reference must not reuse KV blocks that were computed during the kills.
    await asyncio.to_thread(_forget_prefixes, cluster.targets[0])
    expected += await _ask_all(
        cluster, [reference(each.plan.seeded(each.generation.seed)) for each in outcomes if not each.plan.has_seed]
    )
    by_number = {outcome.plan.number: outcome for outcome in expected}
    found = [compare(outcome, by_number[outcome.plan.number]) for outcome in outcomes]
    inexact = sum(not choice.exact for outcome in outcomes for choice in outcome.generation.choices)
    usages = [each.generation.usage for each in outcomes if each.generation.usage is not None]
    return Report(
        num_streams=num_streams,
        num_equal=sum(not each for each in found),
        differences=[each for stream in found for each in stream],
        breaches=[each for outcome in (*outcomes, *expected) for each in check(outcome)],
        kinds=_count_kinds(outcomes, found),
        kills=killed,
        undisturbed_s=undisturbed_s,
        disturbed_s=disturbed_s,
        reading=dict(sorted(crowd.counts.items())) if isinstance(crowd, AttachedCrowd) else {},
        resumes_by_clients=sum(outcome.generation.num_resumes for outcome in outcomes),
        resubmissions_by_routers=counters["octavo_resubmissions_total"],
        preemptions=counters["octavo_num_preemptions_total"],
        inexact=max(inexact, counters["octavo_inexact_resumes_total"]),
        draft_tokens=sum(usage.draft_tokens for usage in usages),
        accepted_draft_tokens=sum(usage.accepted_draft_tokens for usage in usages),
    )


async def run_attached(
    cluster: Cluster, count: int, kills: Sequence[tuple[Kind, ...]], seed: int, *, mean_tokens: int, say: Say
) -> Report:
    """Runs streams that outlive their connections on a cluster with HTTP ports. Otherwise as run_chaos."""
    ports = [cluster.options.router_http_port(router) for router in range(cluster.options.num_routers)]
    return await run_chaos(
        cluster,
        make_attached_plans(count, seed, mean_tokens=mean_tokens),
        kills,
        seed,
        say=say,
        crowd_of=lambda plans: AttachedCrowd(cluster.targets, ports, plans, seed),
        compare=attached_differences,
    )


async def _kill_all(
    cluster: Cluster,
    crowd: Crowd,
    num_streams: int,
    kills: Sequence[tuple[Kind, ...]],
    num_moves: int,
    choose: random.Random,
    say: Say,
) -> tuple[Killer, list[Kill]]:
    """Starts half of the streams now, the others with the kills, or when few are live."""
    num_more = num_streams // (2 * len(kills))
    killer, killed = Killer(cluster, lambda: crowd.start(num_more)), list[Kill]()
    mover = Mover(cluster.targets, crowd, choose)
    crowd.start(num_streams - num_more * len(kills))
    for kinds in kills:
        crowd.start(max(0, _FEWEST_LIVE - crowd.num_live))
        # Waits by tokens, since a fast machine's streams end within seconds; then by time, off the beat of steps.
        await crowd.receive(int(min(choose.uniform(0, _LARGEST_SHARE) * crowd.num_outstanding, _MOST_TOKENS)))
        await asyncio.sleep(choose.uniform(0, _MOST_SECONDS))
        victims = choose_victims(cluster, kinds, choose)
        num_moved = await mover.move(num_moves)
        at, num_live, num_begun = crowd.elapsed, crowd.num_live, crowd.num_begun
        back_after, num_moved_meanwhile = await asyncio.gather(killer.kill(victims), mover.move(num_moves))
        kill = Kill(
            victims=victims,
            at=at,
            num_live=num_live,
            num_begun=num_begun,
            back_after=back_after,
            num_moved=num_moved + num_moved_meanwhile,
        )
        killed.append(kill)
        say(
            f"{kill.names}: {num_live} streams live, {num_begun} of them begun; {kill.num_moved} migrated; "
            f"served again after {back_after:.1f} s"
        )
    return killer, killed


def _count_kinds(outcomes: Sequence[Outcome], found: Sequence[Sequence[Difference]]) -> dict[str, KindCounts]:
    counts: dict[str, KindCounts] = {}
    for name in sorted({outcome.plan.kind for outcome in outcomes}):
        those = [(each, wrong) for each, wrong in zip(outcomes, found, strict=True) if each.plan.kind == name]
        choices = [choice for outcome, _ in those for choice in outcome.generation.choices]
        counts[name] = KindCounts(
            num_streams=len(those),
            num_sampled=sum(outcome.plan.sampling.temperature != 0 for outcome, _ in those),
            num_equal=sum(not wrong for _, wrong in those),
            num_choices=len(choices),
            num_stopped=sum(choice.finish_reason is FinishReason.STOP for choice in choices),
            num_calls=sum(len(choice.tool_calls) for choice in choices),
        )
    return counts


async def _ask_all(cluster: Cluster, plans: Sequence[Plan]) -> list[Outcome]:
    async with Crowd(cluster.targets, plans) as crowd:
        return await crowd.finish()


def _forget_prefixes(target: str) -> None:
    with Admin(target) as admin:
        admin.reset_prefix_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=300)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument(
        "--tokens",
        type=int,
        help="tokens of a choice, on average; with --structured, at most; default: 80, 200, or 300 with --images",
    )
    parser.add_argument("--structured", action="store_true", help="constrained and tool-calling streams")
    parser.add_argument(
        "--speculation",
        nargs="?",
        const=DRAFTERS[0],
        choices=DRAFTERS,
        help="replicas that draft in different ways; who drafts; default: %(const)s",
    )
    parser.add_argument("--images", action="store_true", help="streams with images, of a tiny Qwen2.5-VL")
    parser.add_argument("--attach", action="store_true", help="streams that outlive their connections, which are cut")
    parser.add_argument("--stages", type=int, default=NUM_STAGES, help="pipeline stages of a replica")
    parser.add_argument("--tensor", type=int, default=1, help="ranks that share each layer; default: %(default)s")
    add_arguments(parser, seed_of="streams and faults")
    add_grey_arguments(parser)
    arguments = parser.parse_args()
    if arguments.grey:
        return run_grey(arguments)
    if arguments.kills < 1 or arguments.streams < 2 * arguments.kills:
        parser.error(
            f"--streams={arguments.streams} --kills={arguments.kills}: there must be a kill, and two streams a kill"
        )

    def run(site: Plain, seed: int, say: Say) -> Coroutine[Any, Any, Report]:
        count, tokens = arguments.streams, arguments.tokens
        kills = choose_kinds(arguments.kills, random.Random(f"{seed}/kills"))
        if arguments.speculation:
            plans = make_speculated_plans(count, seed, mean_tokens=tokens or 80)
            return run_chaos(site.cluster, plans, kills, seed, say=say, check=breaches, reference=without_speculation)
        if arguments.images:
            plans = make_image_plans(count, seed, mean_tokens=tokens or 300)
            return run_chaos(site.cluster, plans, kills, seed, say=say)
        if arguments.attach:
            return run_attached(site.cluster, count, kills, seed, mean_tokens=tokens or 80, say=say)
        if not arguments.structured:
            plans = make_plans(count, seed, mean_tokens=tokens or 80)
            return run_chaos(site.cluster, plans, kills, seed, say=say)
        plans = structured.make_structured_plans(count, seed, max_tokens=tokens or 200)
        return run_chaos(site.cluster, plans, kills, seed, say=say, check=breaches)

    flags = structured.FLAGS if arguments.structured or arguments.speculation else FLAGS
    if arguments.attach:
        flags = (*flags, f"--http-port={free_ports(NUM_ROUTERS)}")
    more = {"command": command(arguments.speculation)} if arguments.speculation else {}

    def stand(directory: Path) -> AbstractContextManager[Plain]:
        if arguments.images:
            return image_cluster(directory, num_stages=arguments.stages, tensor_size=arguments.tensor)
        return plain(directory, *flags, num_stages=arguments.stages, tensor_size=arguments.tensor, **more)

    return run_command(
        arguments,
        stand,
        run,
        as_json=asdict,
        summary=summary,
    )


def summary(report: Report) -> str:
    """Formats the report for people."""
    lines = ["", "      at  of                          live  begun  migrated  served again after"]
    for kill in report.kills:
        counts = f"{kill.num_live:4} {kill.num_begun:6} {kill.num_moved:9}"
        lines.append(f"{kill.at:6.1f} s  {kill.names:27} {counts} {kill.back_after:17.1f} s")
    lines += ["", "streams of                  sampled  equal  choices  stopped  calls"]
    lines += [
        f"{each.num_streams:3} {name:24} {each.num_sampled:6} {each.num_equal:6} {each.num_choices:8} "
        f"{each.num_stopped:8} {each.num_calls:6}"
        for name, each in report.kinds.items()
    ]
    killed = Counter(place.kind.value for kill in report.kills for place in kill.victims)
    lines += [
        "",
        f"{len(report.kills)} kills of {killed.total()} processes: "
        + ", ".join(f"{count} {kind}s" for kind, count in sorted(killed.items())),
        f"{report.num_equal} of {report.num_streams} streams are equal to the undisturbed ones; "
        f"{len(report.breaches)} outputs are not what was asked for",
        f"{report.resumes_by_clients} resumes by clients, {report.resubmissions_by_routers} resubmissions by routers, "
        f"{report.num_moved} migrations, {report.preemptions} preemptions, {report.inexact} inexact",
    ]
    if report.reading:
        lines.append(", ".join(f"{name}: {count}" for name, count in report.reading.items()))
    if report.draft_tokens:
        lines.append(f"{report.accepted_draft_tokens} of {report.draft_tokens} draft tokens accepted")
    lines += [f"{kill.names}: no stream had begun; give more --tokens" for kill in report.kills if not kill.num_begun]
    lines += [f"  {difference}{_before(difference, report.kills)}" for difference in report.differences]
    lines += [f"  {breach}" for breach in report.breaches]
    return "\n".join(lines)


def _before(difference: Difference, kills: Sequence[Kill]) -> str:
    """Names the last kill before the first different token."""
    if difference.at is None:
        return ""
    last = [kill for kill in kills if kill.at <= difference.at][-1:]
    return f"; at {difference.at:.1f} s, after the kill of " + (last[0].names if last else "nobody")


if __name__ == "__main__":
    sys.exit(main())
