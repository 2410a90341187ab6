"""Two tenants of one replica in virtual time: how much of its share does one keep when the other asks for far more?

The router's Session and the scheduler are the real ones (benchmarks.router.virtual_cluster). Requests come at random,
at a fixed rate, and are not sent again if they are refused.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from benchmarks.router.virtual_cluster import VOCAB_SIZE, Request, StepTime, VirtualCluster
from router.replicas.policies import POLICIES
from scheduler.core.messages import CoreSettings

SETTINGS = CoreSettings(
    block_size=16,
    num_blocks=512,
    max_model_len=1024,
    max_num_seqs=32,
    max_num_batched_tokens=1024,
    max_queued_requests=64,
)
NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 64, 64
# A request counts if it ends within so many times the median time that one takes under full load.
MOST_LATENCIES = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A tenant's requests. name: empty: it has no key."""

    name: str
    rate: float
    weight: float = 1.0
    num_output_tokens: int = NUM_OUTPUT_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The most that the cluster completes. latency: of the median request then, in seconds."""

    requests_per_s: float
    latency: float


def run(settings: CoreSettings, tenants: Sequence[Tenant], seconds: float, seed: int) -> list[list[Request]]:
    """Returns each tenant's requests, with their outcomes."""
    made: list[list[Request]] = []
    for number, tenant in enumerate(tenants):
        # A tenant's requests are the same whatever others there are.
        choose, at, requests = random.Random(f"{seed}/{number}"), 0.0, []
        while (at := at + choose.expovariate(tenant.rate)) < seconds:
            token_ids = choose.choices(range(VOCAB_SIZE), k=NUM_PROMPT_TOKENS)
            requests.append(Request(at, token_ids, tenant.num_output_tokens, tenant=tenant.name, weight=tenant.weight))
        made.append(requests)
    cluster = VirtualCluster(POLICIES["least_loaded"](), num_replicas=1, settings=settings, step_time=StepTime())
    cluster.serve(sorted((each for requests in made for each in requests), key=lambda each: each.at))
    return made


@cache
def peak_of(settings: CoreSettings, seed: int) -> Peak:
    """Serves as many requests at a time as there are rows."""
    choose = random.Random(seed)
    requests = [
        Request(0.0, choose.choices(range(VOCAB_SIZE), k=NUM_PROMPT_TOKENS), NUM_OUTPUT_TOKENS) for _ in range(1000)
    ]
    cluster = VirtualCluster(POLICIES["least_loaded"](), num_replicas=1, settings=settings, step_time=StepTime())
    cluster.serve(requests, concurrency=settings.max_num_seqs)
    latencies = sorted(each.latency for each in requests)
    return Peak(requests_per_s=len(requests) / max(each.ended_at for each in requests), latency=latencies[500])


def goodput(requests: Sequence[Request], seconds: float, most_latency: float) -> float:
    """Requests a second that were not refused and ended in time."""
    return sum(not each.was_refused and each.latency <= most_latency for each in requests) / seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The requests a second that the small tenant gets: offered, alone, beside the large one, and if both are one."""

    offered: float
    alone: float
    beside: float
    without_shares: float
    # What the large one gets beside it.
    large: float

    @property
    def share(self) -> float:
        return self.beside / self.alone


def measure(
    settings: CoreSettings = SETTINGS,
    *,
    factor: float = 10.0,
    load: float = 0.9,
    weight: float = 1.0,
    large_output_tokens: int = NUM_OUTPUT_TOKENS,
    seconds: float = 60.0,
    seed: int = 0,
) -> Kept:
    """factor: requests of the large tenant for each one of the small. load: of the small one, in parts of its share.
    weight: the small one's; the large one has 1."""
    peak = peak_of(settings, seed)
    rate = load * peak.requests_per_s * weight / (weight + 1)
    small = Tenant(name="small", rate=rate, weight=weight)
    large = Tenant(name="large", rate=factor * rate, num_output_tokens=large_output_tokens)
    most = MOST_LATENCIES * peak.latency
    (alone,) = run(settings, [small], seconds, seed)
    beside, others = run(settings, [small, large], seconds, seed)
    one, _ = run(settings, [replace(small, name=""), replace(large, name="")], seconds, seed)
    return Kept(
        offered=len(alone) / seconds,
        alone=goodput(alone, seconds, most),
        beside=goodput(beside, seconds, most),
        without_shares=goodput(one, seconds, most),
        large=goodput(others, seconds, most),
    )
