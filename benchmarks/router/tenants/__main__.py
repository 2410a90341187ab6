"""Measures what a tenant keeps of its share while another one sends ten times as many requests.

    python -m benchmarks.router.tenants                      virtual time and a real cluster, four minutes
    python -m benchmarks.router.tenants --part workers --seconds 60
    python -m benchmarks.router.tenants --part virtual --json

workers: SmolLM2 behind one router and one scheduler (`octavo up`), with 8 rows and a queue of 16 requests; prompts of
16 tokens, 16 out. A closed loop gives the cluster's peak. Then the small tenant sends 90% of what its share, half of
the peak, would serve, first alone, then beside a large tenant that sends ten times as much; at last the two have keys
of one tenant, so that there are no shares. This is repeated, and the median of the rounds counts. Requests come at
random, by raw calls that never retry. Goodput is tokens/s of requests that finish within ten times the median latency
at the peak. The senders are this process, which shares the cores with the cluster.

virtual: the same in virtual time (benchmarks.router.tenants.virtual), where figures are exact, with other weights and
lengths, too. Goodput is requests/s that finish within three times the median latency at the peak.

Exits 1 if the small tenant keeps less than 90% of what it has alone, where both send requests of one kind.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import grpc
import grpc.aio

from benchmarks.cluster.small_cluster import cluster
from benchmarks.router.offered_load import REFUSED, Outcomes, Sender, Shape, closed_loop, open_loop
from benchmarks.router.tenants import virtual
from benchmarks.router.tenants.virtual import NUM_OUTPUT_TOKENS, SETTINGS
from protos.inference_pb2_grpc import InferenceStub
from tests.support.ports import free_port

NUM_ROWS, NUM_QUEUED = 8, 16
FACTOR, LOAD, LEAST_KEPT = 10, 0.9, 0.9
# More than in virtual time, as other work of the machine makes steps slower for a while.
MOST_LATENCIES = 10.0
# A measurement begins once requests end as fast as they begin, and is much longer than a request.
WARM_UP_LATENCIES, LEAST_LATENCIES = 5.0, 20.0
# Keys by tenant. The last two belong to one tenant.
_KEYS = {name: f"{name}-0123456789abcdef" for name in ("small", "large", "one", "other")}
_TENANTS = {"small": "small", "large": "large", "one": "one", "other": "one"}
_CASES: dict[str, dict[str, object]] = {
    "equal weights": {},
    "equal weights, at all of its share": {"load": 1.0},
    "weight 3": {"weight": 3.0},
    "weight 1/4": {"weight": 0.25},
    "scarce KV cache": {"settings": replace(SETTINGS, num_blocks=160)},
    "policy priority with aging": {"settings": replace(SETTINGS, scheduling_policy="priority", priority_aging=5.0)},
}
# No running request gives up its place, so long outputs of others cost a part of the share.
_LONG_CASES: dict[str, dict[str, object]] = {
    "long outputs beside it": {"large_output_tokens": 8 * NUM_OUTPUT_TOKENS},
    "the same with a scarce KV cache": {
        "large_output_tokens": 8 * NUM_OUTPUT_TOKENS,
        "settings": replace(SETTINGS, num_blocks=160),
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The small tenant alone, beside the large one, and beside it as the same tenant."""

    alone: Outcomes
    beside: Outcomes
    large: Outcomes
    without_shares: Outcomes

    @property
    def share(self) -> float:
        return self.beside.tokens_per_s / self.alone.tokens_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    peak: Outcomes
    offered_per_s: float
    rounds: list[Round]

    @property
    def share(self) -> float:
        return statistics.median(each.share for each in self.rounds)

    def as_json(self) -> dict[str, object]:
        names = ("alone", "beside", "large", "without_shares")
        return {
            "peak_tokens_per_s": self.peak.tokens_per_s,
            "offered_requests_per_s": self.offered_per_s,
            **{name: [getattr(each, name).tokens_per_s for each in self.rounds] for name in names},
            "large_refused": sum(each.large.ends[REFUSED] for each in self.rounds),
            "small_refused": sum(each.beside.ends[REFUSED] for each in self.rounds),
            "share": self.share,
        }


def write_keys(directory: Path) -> Path:
    path = directory / "keys.yaml"
    entries = [{"name": _TENANTS[name], "key": key} for name, key in _KEYS.items()]
    path.write_text(json.dumps({"keys": entries}))
    path.chmod(0o600)
    return path


async def measure(target: str, num_rounds: int, seconds: float, seed: int) -> Measured:
    async with grpc.aio.insecure_channel(target) as channel:
        stub = InferenceStub(channel)
        calm = Sender(stub, Shape(), random.Random(seed), api_key=_KEYS["one"])
        peak = await closed_loop(calm, NUM_ROWS, warm_up=2.0, seconds=seconds)
        latency = statistics.median(peak.latencies)
        most = MOST_LATENCIES * latency
        shape = Shape(deadlines=(most, most), share_with_deadline=1.0)
        rate = LOAD * peak.tokens_per_s / shape.num_output_tokens / 2

        async def load(name: str, rate: float) -> Outcomes:
            # A rate has the same arrivals each time.
            choose = random.Random(f"{seed}/{rate}")
            sender = Sender(stub, shape, choose, api_key=_KEYS[name])
            warm_up, least = WARM_UP_LATENCIES * latency, LEAST_LATENCIES * latency
            return await open_loop(sender, rate, choose, warm_up=warm_up, seconds=max(seconds, least))

        rounds = []
        for _ in range(num_rounds):
            alone = await load("small", rate)
            beside, large = await asyncio.gather(load("small", rate), load("large", FACTOR * rate))
            one, _ = await asyncio.gather(load("one", rate), load("other", FACTOR * rate))
            rounds.append(Round(alone=alone, beside=beside, large=large, without_shares=one))
    return Measured(peak=peak, offered_per_s=rate, rounds=rounds)


def measure_workers(num_rounds: int, seconds: float, seed: int) -> Measured:
    port = free_port()
    with tempfile.TemporaryDirectory() as directory:
        keys = write_keys(Path(directory))
        bounds = (f"--max-num-seqs={NUM_ROWS}", f"--max-queued-requests={NUM_QUEUED}", "--data-parallel-size=1")
        with cluster(port, *bounds, f"--api-keys-file={keys}"):
            return asyncio.run(measure(f"localhost:{port}", num_rounds, seconds, seed))


def show(measured: Measured) -> None:
    print(
        f"SmolLM2 on this machine: peak {measured.peak.tokens_per_s:.0f} tokens/s; the small tenant sends "
        f"{measured.offered_per_s:.1f} requests/s, the large one {FACTOR} times as many"
    )
    for each in measured.rounds:
        print(
            f"    the small one gets {each.alone.tokens_per_s:.0f} tokens/s alone, {each.beside.tokens_per_s:.0f} "
            f"beside it ({each.share:.2f}), {each.without_shares.tokens_per_s:.0f} without shares; the large one gets "
            f"{each.large.tokens_per_s:.0f}; refused: {each.beside.ends[REFUSED]} and {each.large.ends[REFUSED]}"
        )
    print(f"    median share {measured.share:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["workers", "virtual"], help="only this part")
    parser.add_argument("--seconds", type=float, default=15.0, help="least seconds of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="of the measurements with workers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    shares: list[float] = []
    results: dict[str, dict[str, object]] = {}
    if arguments.part != "workers":
        for name, changes in (_CASES | _LONG_CASES).items():
            kept = virtual.measure(seconds=arguments.seconds, seed=arguments.seed, **changes)  # type: ignore[arg-type]
            results[name] = {**asdict(kept), "share": kept.share}
            if name in _CASES:
                shares.append(kept.share)
            if not arguments.json:
                figures = f"{kept.alone:5.1f}/s alone, {kept.beside:5.1f}/s beside the large one ({kept.share:.2f})"
                print(f"{name:36s} {figures}, {kept.without_shares:5.1f}/s without shares", flush=True)
    if arguments.part != "virtual":
        measured = measure_workers(arguments.rounds, arguments.seconds, arguments.seed)
        results["workers"] = measured.as_json()
        shares.append(measured.share)
        if not arguments.json:
            show(measured)
    if arguments.json:
        print(json.dumps(results))
    sys.exit(1 if min(shares) < LEAST_KEPT else 0)


if __name__ == "__main__":
    main()
