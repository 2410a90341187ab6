"""Compares routing policies over many replicas, in simulated time.

    python -m benchmarks.router.policies [--replicas 1000] [--seconds 20] [--load 0.8] [--json]

The router's own policies place requests on simulated replicas: a step takes a fixed time, and more for each prompt
token and each sequence in it; a prefix cache has a fixed number of blocks and evicts the least recently used one. Loads
are those of a replica's last step, as a Session brings them. Three workloads: prompts that have nothing in common;
prompts of a few hundred prefixes, some far more frequent than others; conversations that come back with their whole
history. Prints the time to the first token, the share of prompt tokens found in caches, and the busiest replica's work
over the mean.
"""

import argparse
import heapq
import itertools
import json
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from protos.scheduler_pb2 import CacheEvent
from router.accepted import RoutingHints
from router.replicas.policies import POLICIES, Policy, ReplicaLoad
from runtime.block_hashes import hash_prompt_blocks, scope_of

_BLOCK_SIZE, _BUDGET, _MAX_BLOCKS = 64, 2048, 4096
# Seconds of a step: the fixed part, a prompt token in it, a sequence in it.
_STEP_S, _PROMPT_TOKEN_S, _SEQUENCE_S = 0.008, 20e-6, 50e-6


@dataclass(slots=True)
class _Request:
    at: float
    token_ids: range
    output_tokens: int
    session: str
    names: list[bytes] = field(default_factory=list)
    to_compute: int = 0
    first_token: float = 0.0


@dataclass(slots=True)
class _Replica:
    """A replica with continuous batching."""

    number: int
    waiting: deque[_Request] = field(default_factory=deque)
    # Output tokens that each sequence still has to decode.
    running: list[int] = field(default_factory=list)
    cached: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    is_stepping: bool = False
    load: tuple[int, int] = (0, 0)
    # Sequences and tokens of the requests that were sent since `load`.
    sent: tuple[int, int] = (0, 0)
    busy: float = 0.0

    def begin_step(self, now: float) -> tuple[float, list[_Request]]:
        """Returns when the step ends, and the requests whose prompts are computed by then."""
        budget, done, computed = max(_BUDGET - len(self.running), 1), [], 0
        while self.waiting and budget:
            request = self.waiting[0]
            count = min(request.to_compute, budget)
            request.to_compute -= count
            budget -= count
            computed += count
            if not request.to_compute:
                done.append(self.waiting.popleft())
        seconds = _STEP_S + computed * _PROMPT_TOKEN_S + (len(self.running) + len(done)) * _SEQUENCE_S
        self.busy += seconds
        self.running = [left - 1 for left in self.running if left > 1]
        return now + seconds, done

    def find(self, request: _Request) -> int:
        """Number of the prompt's first blocks that are cached."""
        count = 0
        for name in request.names:
            if name not in self.cached:
                break
            self.cached.move_to_end(name)
            count += 1
        return count

    def store(self, names: list[bytes]) -> list[CacheEvent]:
        events = []
        for name in names:
            if name not in self.cached:
                events.append(CacheEvent(stored=name))
            self.cached[name] = None
            self.cached.move_to_end(name)
        while len(self.cached) > _MAX_BLOCKS:
            events.append(CacheEvent(removed=self.cached.popitem(last=False)[0]))
        return events


def simulate(policy: Policy, requests: list[_Request], num_replicas: int) -> dict[str, float]:
    replicas = [_Replica(number) for number in range(num_replicas)]
    if policy.prefix_index is not None:
        for replica in replicas:
            policy.prefix_index.add(replica.number, block_size=_BLOCK_SIZE, max_blocks=2 * _MAX_BLOCKS)
    # Time, order, and either an arriving request, or a replica whose step ends and the prompts that it computed.
    events: list[tuple[float, int, _Request | tuple[_Replica, list[_Request]]]] = []
    order, num_found = itertools.count(), 0
    for request in requests:
        heapq.heappush(events, (request.at, next(order), request))
    while events:
        now, _, event = heapq.heappop(events)
        if isinstance(event, _Request):
            replica = replicas[_place(policy, replicas, event)]
            found = replica.find(event) * _BLOCK_SIZE
            num_found += found
            event.to_compute = max(len(event.token_ids) - found, 1)
            replica.waiting.append(event)
            replica.sent = replica.sent[0] + 1, replica.sent[1] + len(event.token_ids)
        else:
            replica, done = event
            told = []
            for request in done:
                request.first_token = now
                replica.running.append(request.output_tokens)
                told += replica.store(request.names)
            if policy.prefix_index is not None:
                policy.prefix_index.apply(replica.number, told)
            replica.is_stepping = False
            queued = sum(request.to_compute for request in replica.waiting)
            replica.load, replica.sent = (len(replica.running) + len(replica.waiting), queued), (0, 0)
        if not replica.is_stepping and (replica.waiting or replica.running):
            replica.is_stepping = True
            end, done = replica.begin_step(now)
            heapq.heappush(events, (end, next(order), (replica, done)))
    waits = np.array([request.first_token - request.at for request in requests])
    busy = np.array([replica.busy for replica in replicas])
    num_tokens = sum(len(request.token_ids) for request in requests)
    return {
        "ttft_mean_ms": 1000 * waits.mean(),
        "ttft_p50_ms": 1000 * np.quantile(waits, 0.5),
        "ttft_p99_ms": 1000 * np.quantile(waits, 0.99),
        "found": num_found / num_tokens,
        "busiest_to_mean": busy.max() / busy.mean(),
    }


def _place(policy: Policy, replicas: list[_Replica], request: _Request) -> int:
    loads = [
        ReplicaLoad(replica=i, num_sequences=each.load[0] + each.sent[0], num_queued_tokens=each.load[1] + each.sent[1])
        for i, each in enumerate(replicas)
    ]
    return policy.choose(loads, RoutingHints(token_ids=request.token_ids, session_key=request.session))[0]


# --- Workloads: token ids are ranges, so that equal beginnings are equal prefixes


def _nothing_in_common(random_: random.Random) -> Iterator[tuple[range, str]]:
    for number in itertools.count():
        start = number * 8192
        yield range(start, start + random_.randint(64, 2048)), f"session {number}"


def _few_prefixes(random_: random.Random) -> Iterator[tuple[range, str]]:
    """Prompts with 300 prefixes of 1,024 tokens; a prefix's frequency is inversely proportional to its rank."""
    weights = [1 / rank for rank in range(1, 301)]
    for number in itertools.count():
        prefix = random_.choices(range(300), weights)[0]
        # The part after the prefix is shorter than a block, so it is never found in a cache.
        yield range(prefix * 8192, prefix * 8192 + 1024 + random_.randint(1, 63)), f"session {number}"


def _conversations(random_: random.Random) -> Iterator[tuple[range, str]]:
    """4,000 conversations at a time; a turn adds 256 tokens, and after some eight turns a new conversation begins."""
    turns, names = [0] * 4000, list(range(4000))
    fresh = itertools.count(4000)
    while True:
        slot = random_.randrange(4000)
        turns[slot] += 1
        yield range(names[slot] * 8192, names[slot] * 8192 + 256 * turns[slot]), f"session {names[slot]}"
        if random_.random() < 0.125 or turns[slot] == 31:
            turns[slot], names[slot] = 0, next(fresh)


_WORKLOADS: dict[str, Callable[[random.Random], Iterator[tuple[range, str]]]] = {
    "nothing in common": _nothing_in_common,
    "few prefixes": _few_prefixes,
    "conversations": _conversations,
}


def make_requests(workload: str, num_replicas: int, seconds: float, load: float) -> list[_Request]:
    """Makes requests at a rate that takes `load` of the replicas' capacity without caches."""
    random_ = random.Random(0)
    source = _WORKLOADS[workload](random_)
    sample = list(itertools.islice(_WORKLOADS[workload](random.Random(1)), 2000))
    mean_tokens, output_tokens = sum(len(ids) for ids, _ in sample) / len(sample), 64
    # A sequence decodes in steps that it shares with some 32 others.
    cost = mean_tokens * _PROMPT_TOKEN_S + output_tokens * (_SEQUENCE_S + _STEP_S / 32)
    rate, at, requests = load * num_replicas / cost, 0.0, []
    while (at := at + random_.expovariate(rate)) < seconds:
        ids, session = next(source)
        names = hash_prompt_blocks(ids, _BLOCK_SIZE, scope_of(""))
        requests.append(_Request(at, ids, random_.randint(1, 2 * output_tokens), session, names))
    return requests


def main() -> int:
    parser = argparse.ArgumentParser(description="Compares routing policies in simulated time.")
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=2.0, help="simulated seconds in which requests come")
    parser.add_argument("--load", type=float, default=0.8, help="fraction of the replicas' capacity without caches")
    parser.add_argument("--json", action="store_true", help="a line for each workload and policy")
    arguments = parser.parse_args()
    for workload in _WORKLOADS:
        for name in POLICIES:
            requests = make_requests(workload, arguments.replicas, arguments.seconds, arguments.load)
            figures = simulate(POLICIES[name](), requests, arguments.replicas)
            if arguments.json:
                print(json.dumps({"workload": workload, "policy": name, "requests": len(requests), **figures}))
                continue
            mean, p50, p99 = (figures[f"ttft_{which}_ms"] for which in ("mean", "p50", "p99"))
            print(
                f"{workload:18} {name:16} TTFT mean {mean:6.1f} ms, p50 {p50:6.1f}, p99 {p99:6.1f}; "
                f"found {figures['found']:4.0%}; busiest {figures['busiest_to_mean']:.2f} of the mean",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
