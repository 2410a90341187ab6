"""Measures what prefix-aware routing gains over round robin on 4 replicas, and its cost when nothing is shared.

    python -m benchmarks.router.prefix_routing [--json]        both parts, about 5 minutes on 2 cores
    python -m benchmarks.router.prefix_routing --part workers  real workers: share of prompt tokens found in caches
    python -m benchmarks.router.prefix_routing --part time     fake workers under a time model: waits and throughput

workers: `octavo up` with 4 replicas of SmolLM2, and a router of each policy over the same schedulers. The routers take
turns, each with cold caches. Chats about 20 pages of 300 to 700 tokens (from docs/, as system prompts), 4 questions
each, in random order, 8 at a time. A replica's KV cache has 192 blocks of 16 tokens: room for 7 of the pages. The waits
are those of 4 workers on the cores of this machine, and depend on its other work.

time: `benchmarks.router.virtual_cluster`, in virtual time, so that even a difference of 1% is real. A step takes 8 ms,
20 us a prompt token and 50 us a sequence, about an 8B model on one fast GPU; a replica has 4,096 blocks of 16 tokens.
Requests come at random, 80 a second (open), or 128 at a time (closed). shared: 128 prefixes of 1,024 tokens, twice
what a replica has blocks for, each followed by 32 to 256 tokens of its own. nothing: 256 to 2,048 tokens, no two
prompts alike. Outputs have 32 to 128 tokens. Ratios compare two runs of the same requests: the median, least and
greatest over the seeds.
"""

import argparse
import asyncio
import contextlib
import http.client
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.cluster.up import started
from benchmarks.command import rounded, show
from benchmarks.peers.server_process import end
from benchmarks.router.virtual_cluster import VOCAB_SIZE, Request, Served, StepTime, VirtualCluster
from configs.load import load_options
from configs.options import Options
from octavo import AsyncClient, SamplingParams
from octavo.client.admin import Admin
from octavo.client.results import Delta
from octavo.cluster.serving import wait_until_serving
from router.replicas.policies import POLICIES
from scheduler.core.messages import CoreSettings
from tests.support.ports import free_port, free_ports

_ROOT = Path(__file__).resolve().parents[2]
_READY_TIMEOUT = 120.0
_QUESTIONS = (
    "What is this page about?",
    "Which option is named first?",
    "Who should read this?",
    "Is there a number in it?",
)
_MAX_TOKENS = 8

Chat = list[dict[str, str]]


def make_chats(num_prefixes: int, num_questions: int, seed: int) -> list[Chat]:
    """Pages from docs/ as system prompts of 300 to 700 tokens, each with each question, in random order."""
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted((_ROOT / "docs").glob("*.md")))
    lengths = random.Random(0)
    pages = []
    for index in range(num_prefixes):
        start = index * len(text) // num_prefixes
        pages.append(text[start : start + lengths.randint(1050, 1750)])
    chats: list[Chat] = [
        [
            {"role": "system", "content": f"Answer questions about this page.\n\n{page}"},
            {"role": "user", "content": question},
        ]
        for page in pages
        for question in _QUESTIONS[:num_questions]
    ]
    random.Random(seed).shuffle(chats)
    return chats


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The figures of one run; times in seconds. scheduler_hit_rate: by the schedulers' own counters."""

    num_requests: int
    num_prompt_tokens: int
    hit_rate: float
    scheduler_hit_rate: float
    ttft_p50: float
    ttft_p90: float
    seconds: float


class Cluster:
    """`octavo up`, and a router of each policy over its schedulers."""

    def __init__(self, options: Options, targets: dict[str, str]) -> None:
        self._options, self._targets = options, targets

    def measure(self, policy: str, chats: Sequence[Chat], concurrency: int) -> Measured:
        """Runs the chats with cold caches, in a closed loop: each answer lets the next chat begin."""
        with Admin(self._targets[policy]) as admin:
            admin.reset_prefix_cache()
        before = self._scheduler_counts()
        began = time.perf_counter()
        answers = asyncio.run(_ask_all(self._targets[policy], chats, concurrency))
        seconds = time.perf_counter() - began
        queries, hits = (after - was for after, was in zip(self._scheduler_counts(), before, strict=True))
        num_prompt_tokens = sum(answer.num_prompt_tokens for answer in answers)
        ttfts = [answer.ttft for answer in answers]
        return Measured(
            num_requests=len(answers),
            num_prompt_tokens=num_prompt_tokens,
            hit_rate=sum(answer.num_cached_tokens for answer in answers) / num_prompt_tokens,
            scheduler_hit_rate=hits / queries,
            ttft_p50=float(np.percentile(ttfts, 50)),
            ttft_p90=float(np.percentile(ttfts, 90)),
            seconds=seconds,
        )

    def _scheduler_counts(self) -> tuple[float, float]:
        """Tokens looked up in prefix caches so far, and found, over all replicas."""
        totals = {"octavo_prefix_cache_queries_total": 0.0, "octavo_prefix_cache_hits_total": 0.0}
        for replica in range(self._options.data_parallel_size):
            port = self._options.process_metrics_port("scheduler", replica)
            connection = http.client.HTTPConnection(self._options.metrics_host, port, timeout=10)
            with contextlib.closing(connection):
                connection.request("GET", "/metrics")
                text = connection.getresponse().read().decode()
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if sample.name in totals:
                        totals[sample.name] += sample.value
        queries, hits = totals.values()
        return queries, hits


@contextlib.contextmanager
def running_cluster(policies: Sequence[str], num_replicas: int, num_blocks: int, log: int) -> Iterator[Cluster]:
    """Runs a cluster with a router of each policy. log: a file descriptor for the processes' output."""
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        config = Path(directory, "run", "options.yaml")
        own = f"localhost:{free_port()}"
        up = started(
            *(f"--runtime-dir={config.parent}", f"--port={own.partition(':')[2]}"),
            *(f"--metrics-port={free_ports(1 + 2 * num_replicas)}", f"--data-parallel-size={num_replicas}"),
            *(f"--num-blocks-override={num_blocks}", "--worker-threads=1"),
            output=log,
        )
        stack.enter_context(up)
        _wait(own)
        targets = {policy: f"localhost:{free_port()}" for policy in policies}
        for policy, target in targets.items():
            router = [
                *(sys.executable, "-m", "router", "-c", str(config), f"--port={target.partition(':')[2]}"),
                *(f"--routing-policy={policy}", "--metrics-port=0"),
            ]
            process = subprocess.Popen(router, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            stack.callback(end, process)
            _wait(target)
        yield Cluster(load_options(config, {}), targets)


def _wait(target: str) -> None:
    asyncio.run(asyncio.wait_for(wait_until_serving(target), _READY_TIMEOUT))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    num_prompt_tokens: int
    num_cached_tokens: int
    ttft: float


async def _ask_all(target: str, chats: Sequence[Chat], concurrency: int) -> list[_Answer]:
    waiting, answers = deque(chats), list[_Answer]()

    async def ask_in_turn() -> None:
        while waiting:
            answers.append(await _ask(client, waiting.popleft()))

    async with AsyncClient(target, timeout=300) as client:
        await asyncio.gather(*(ask_in_turn() for _ in range(concurrency)))
    return answers


async def _ask(client: AsyncClient, chat: Chat) -> _Answer:
    sampling = SamplingParams(temperature=0.0, max_tokens=_MAX_TOKENS, ignore_eos=True)
    began, ttft = time.perf_counter(), 0.0
    async with client.stream(chat, sampling) as stream:
        async for event in stream:
            if isinstance(event, Delta) and not ttft:
                ttft = time.perf_counter() - began
        usage = stream.generation.usage
    assert usage is not None, "the stream has ended"
    return _Answer(num_prompt_tokens=usage.prompt_tokens, num_cached_tokens=usage.cached_tokens, ttft=ttft)


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
# Concurrent requests, by name; 0: they come at random.
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
            # The policies' order alternates from round to round.
            for policy in _POLICIES if number % 2 == 0 else reversed(_POLICIES):
                measured = cluster.measure(policy, chats, _CONCURRENCY)
                rates[policy].append(measured.hit_rate)
                yield {"part": "workers", "policy": policy, "round": number, **asdict(measured)}
    pairs = zip(rates[_AWARE], rates[_IN_TURN], strict=True)
    yield {"part": "workers", **_ratio("hit_rate", [aware / in_turn for aware, in_turn in pairs])}


def _ratio(name: str, ratios: list[float]) -> dict[str, object]:
    """Ratios of prefix_aware over round_robin."""
    return {"ratio_of": name, "median": statistics.median(ratios), "least": min(ratios), "greatest": max(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("workers", "time"), help="default: both")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of real workers, with each policy")
    parser.add_argument("--seeds", type=int, default=5, help="seeds of the time model")
    parser.add_argument("--requests", type=int, default=600, help="requests of the time model, for each seed")
    parser.add_argument("--log", default="/dev/null", help="file for the real processes' output")
    parser.add_argument("--json", action="store_true", help="a line of JSON a result")
    arguments = parser.parse_args()
    if arguments.part != "time":
        with open(arguments.log, "wb") as log:
            for line in real_workers(arguments.rounds, log.fileno()):
                show(rounded(line, 4), as_json=arguments.json)
    if arguments.part != "workers":
        for line in time_model(arguments.seeds, arguments.requests):
            show(rounded(line, 4), as_json=arguments.json)


if __name__ == "__main__":
    main()
