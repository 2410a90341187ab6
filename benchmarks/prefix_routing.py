"""What routing by prefixes gains over turns, on 4 replicas, and what it costs where nothing is shared.

    python -m benchmarks.prefix_routing [--json]             both parts, about 5 minutes on 2 cores
    python -m benchmarks.prefix_routing --part workers       real workers: share of prompt tokens found in prefix caches
    python -m benchmarks.prefix_routing --part time          fake workers under a time model: waits and throughput

workers: `octavo up` with 4 replicas of SmolLM2, and a router of each policy over the same schedulers, in turns, each
with cold caches. Chats about 20 pages of 300 to 700 tokens (out of docs/, as system prompts), 4 questions each, in
random order, 8 at a time. A replica's KV cache has 192 blocks of 16 tokens: room for 7 of the pages. The waits are
those of 4 workers on the cores of this machine, and depend on what else it does.

time: `benchmarks.virtual_cluster`, in virtual time, so that a difference of 1% is one. A step takes 8 ms, 20 us a
prompt token and 50 us a sequence, about an 8B model on one fast GPU; a replica has 4,096 blocks of 16 tokens. Requests
come at random, 80 a second (open), or 128 at a time (closed). shared: 128 prefixes of 1,024 tokens, twice what a
replica has blocks for, with 32 to 256 tokens of one's own. nothing: 256 to 2,048 tokens, no two prompts alike. Outputs
have 32 to 128 tokens. Ratios are those of two runs of the same requests; the median, least and greatest over the seeds.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict

import numpy as np

from benchmarks.prefix_workers import make_chats, running_cluster
from benchmarks.virtual_cluster import VOCAB_SIZE, Request, Served, StepTime, VirtualCluster
from router.policies import POLICIES
from scheduler.messages import CoreSettings

_AWARE, _IN_TURN = "prefix_aware", "round_robin"
_POLICIES = (_IN_TURN, _AWARE)
_NUM_REPLICAS = 4

# --- Real workers
_NUM_BLOCKS, _NUM_PAGES, _NUM_QUESTIONS, _CONCURRENCY = 192, 20, 4, 8

# --- The time model
_SETTINGS = CoreSettings(
    block_size=16,
    num_blocks=4096,
    max_model_len=8192,
    max_num_seqs=128,
    max_num_batched_tokens=2048,
    max_steps_in_flight=2,
)
_NUM_PREFIXES, _PREFIX_TOKENS = 128, 1024
_REQUESTS_PER_SECOND = 80.0
# By name: requests under way at a time; 0: they come at random.
_ARRIVALS = {"open": 0, "closed": 128}
_WORKLOADS = ("shared", "nothing")


def make_requests(workload: str, seed: int, count: int, num_prefixes: int = _NUM_PREFIXES) -> list[Request]:
    random = np.random.default_rng(seed)
    prefixes = random.integers(0, VOCAB_SIZE, (num_prefixes, _PREFIX_TOKENS)).tolist()
    requests, at = [], 0.0
    for _ in range(count):
        at += random.exponential(1 / _REQUESTS_PER_SECOND)
        if workload == "shared":
            own = random.integers(0, VOCAB_SIZE, int(random.integers(32, 257))).tolist()
            prompt = prefixes[random.integers(num_prefixes)] + own
        else:
            prompt = random.integers(0, VOCAB_SIZE, int(random.integers(256, 2049))).tolist()
        requests.append(Request(at, prompt, int(random.integers(32, 129))))
    return requests


def simulate(policy: str, workload: str, arrivals: str, seed: int, count: int) -> dict[str, float]:
    requests = make_requests(workload, seed, count)
    cluster = VirtualCluster(POLICIES[policy](), num_replicas=_NUM_REPLICAS, settings=_SETTINGS, step_time=StepTime())
    cluster.serve(requests, concurrency=_ARRIVALS[arrivals])
    served = Served(requests=requests)
    return {
        "hit_rate": served.hit_rate,
        "ttft_ms_mean": served.ttft_ms_mean,
        "ttft_ms_p50": served.ttft_ms(50),
        "ttft_ms_p99": served.ttft_ms(99),
        "output_tok_s": served.output_tokens_per_second,
        "choosing_us": 1e6 * cluster.choosing_s / count,
    }


def time_model(num_seeds: int, count: int) -> Iterator[dict[str, object]]:
    for workload in _WORKLOADS:
        for arrivals in _ARRIVALS:
            runs = {
                policy: [simulate(policy, workload, arrivals, seed, count) for seed in range(num_seeds)]
                for policy in _POLICIES
            }
            about: dict[str, object] = {"part": "time", "workload": workload, "arrivals": arrivals}
            for policy in _POLICIES:
                medians = {name: statistics.median(run[name] for run in runs[policy]) for name in runs[policy][0]}
                yield {**about, "policy": policy, "seeds": num_seeds, "requests": count, **medians}
            for name in ("ttft_ms_mean", "ttft_ms_p50", "ttft_ms_p99", "output_tok_s"):
                pairs = zip(runs[_AWARE], runs[_IN_TURN], strict=True)
                yield {**about, **_ratio(name, [aware[name] / in_turn[name] for aware, in_turn in pairs])}


def real_workers(num_rounds: int, log: int) -> Iterator[dict[str, object]]:
    rates: dict[str, list[float]] = {policy: [] for policy in _POLICIES}
    with running_cluster(_POLICIES, _NUM_REPLICAS, _NUM_BLOCKS, log) as cluster:
        for number in range(num_rounds):
            chats = make_chats(_NUM_PAGES, _NUM_QUESTIONS, seed=number)
            # Whoever comes first in one round comes last in the next.
            for policy in _POLICIES if number % 2 == 0 else reversed(_POLICIES):
                measured = cluster.measure(policy, chats, _CONCURRENCY)
                rates[policy].append(measured.hit_rate)
                yield {"part": "workers", "policy": policy, "round": number, **asdict(measured)}
    pairs = zip(rates[_AWARE], rates[_IN_TURN], strict=True)
    yield {"part": "workers", **_ratio("hit_rate", [aware / in_turn for aware, in_turn in pairs])}


def _ratio(name: str, ratios: list[float]) -> dict[str, object]:
    """Prefix-aware over in turns."""
    return {"ratio_of": name, "median": statistics.median(ratios), "least": min(ratios), "greatest": max(ratios)}


def _show(line: dict[str, object], as_json: bool) -> None:
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in line.items()}
    text = json.dumps(rounded) if as_json else "  ".join(f"{name} {value}" for name, value in rounded.items())
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("workers", "time"), help="default: both")
    parser.add_argument("--rounds", type=int, default=2, help="of real workers, each policy in each")
    parser.add_argument("--seeds", type=int, default=5, help="of the time model")
    parser.add_argument("--requests", type=int, default=600, help="of the time model, for each seed")
    parser.add_argument("--log", default="/dev/null", help="file for what the real processes print")
    parser.add_argument("--json", action="store_true", help="a line of JSON a result")
    arguments = parser.parse_args()
    if arguments.part != "time":
        with open(arguments.log, "wb") as log:
            for line in real_workers(arguments.rounds, log.fileno()):
                _show(line, arguments.json)
    if arguments.part != "workers":
        for line in time_model(arguments.seeds, arguments.requests):
            _show(line, arguments.json)


if __name__ == "__main__":
    main()
