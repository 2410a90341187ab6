"""Replicas of SmolLM2 whose KV caches are small, and chats about more pages than each of them can hold."""

import asyncio
import contextlib
import http.client
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.peers.server_process import end, free_port
from configs.load import load_options
from configs.options import Options
from octavo import AsyncClient, SamplingParams
from octavo.admin import Admin
from octavo.cluster.serving import wait_until_serving
from octavo.results import Delta

_ROOT = Path(__file__).resolve().parent.parent
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
    """Pages out of docs/ as system prompts of 300 to 700 tokens, each with each question, in random order."""
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
    """Of one run; times in seconds. scheduler_hit_rate: by the schedulers' own counters."""

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
        """With cold caches. A closed loop: each answer lets the next chat begin."""
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
    """log: a file descriptor for what the processes print."""
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        config = Path(directory, "run", "options.yaml")
        own = f"localhost:{free_port()}"
        up = [
            *(str(Path(sys.executable).with_name("octavo")), "up", f"--runtime-dir={config.parent}", "--http-port=0"),
            *(f"--port={own.partition(':')[2]}", f"--metrics-port={_free_ports(1 + 2 * num_replicas)}"),
            *(f"--data-parallel-size={num_replicas}", f"--num-blocks-override={num_blocks}", "--worker-threads=1"),
        ]
        _start(stack, up, own, log)
        targets = {policy: f"localhost:{free_port()}" for policy in policies}
        for policy, target in targets.items():
            router = [
                *(sys.executable, "-m", "router", "-c", str(config), f"--port={target.partition(':')[2]}"),
                *(f"--routing-policy={policy}", "--metrics-port=0"),
            ]
            _start(stack, router, target, log)
        yield Cluster(load_options(config, {}), targets)


def _start(stack: contextlib.ExitStack, command: Sequence[str], target: str, log: int) -> None:
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    stack.callback(end, process)
    asyncio.run(asyncio.wait_for(wait_until_serving(target), _READY_TIMEOUT))


def _free_ports(count: int) -> int:
    """The first of so many in a row that nothing listens at."""
    while True:
        first = random.randrange(20_000, 30_000)
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
        return first


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
