"""Requests sent to a router by raw calls, in closed and open loops, and what became of each.

Nothing here is polite: no call is tried again, none waits as it is told to. Prompts are token ids, for the sender must
not take the cores from what it measures.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import grpc
import grpc.aio
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from protos import inference_pb2 as pb
from protos.inference_pb2_grpc import InferenceStub

FINISHED, REFUSED = "finished", grpc.StatusCode.RESOURCE_EXHAUSTED.name

# Of SmolLM2; its first ones are special.
_TOKENS = range(100, 40_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of every request. deadlines: least and most seconds that half of them give; None: none does."""

    num_prompt_tokens: int = 16
    num_output_tokens: int = 16
    deadlines: tuple[float, float] | None = None


@dataclass(slots=True)
class Outcomes:
    """Of a stretch of time, from `began` to `ended` on time.monotonic(). Other times are in seconds.

    Tokens count when they come, if their request finishes at all (in time, if it has a deadline), even later: requests
    that begin together end together, and a stretch would hold one more such crowd or one less.
    """

    began: float = 0.0
    ended: float = inf
    num_tokens: int = 0
    # By "finished", or the name of a status.
    ends: Counter[str] = field(default_factory=Counter)
    # What refusals asked for; refusals that asked for nothing; how long each took.
    retry_delays: list[float] = field(default_factory=list)
    num_without_retry_info: int = 0
    # Refused by a scheduler, when the router had said Started.
    num_refused_late: int = 0
    refusal_seconds: list[float] = field(default_factory=list)
    # Of requests that finished.
    latencies: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    def add(
        self, end: str, times: Sequence[float], began: float, *, has_started: bool, retry_delay: float | None
    ) -> None:
        """A request has ended now. times: of its tokens."""
        if end == FINISHED:
            self.num_tokens += sum(self.began <= at < self.ended for at in times)
        now = time.monotonic()
        if not self.began <= now < self.ended:
            return
        self.ends[end] += 1
        if end == FINISHED:
            self.latencies.append(now - began)
        elif end == REFUSED:
            self.refusal_seconds.append(now - began)
            self.num_refused_late += has_started
            if retry_delay is None:
                self.num_without_retry_info += 1
            else:
                self.retry_delays.append(retry_delay)


class Sender:
    """Sends requests of one shape."""

    def __init__(self, stub: InferenceStub, shape: Shape, choose: random.Random) -> None:
        self.shape = shape
        self._stub, self._choose = stub, choose

    async def send(self, outcomes: Outcomes) -> None:
        """One request, to its end."""
        shape, choose = self.shape, self._choose
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=choose.choices(_TOKENS, k=shape.num_prompt_tokens)),
            sampling=pb.SamplingParams(temperature=0.0, max_tokens=shape.num_output_tokens, ignore_eos=True),
        )
        deadlines = shape.deadlines
        timeout = choose.uniform(*deadlines) if deadlines is not None and choose.random() < 0.5 else None
        began, end, has_started, retry_delay = time.monotonic(), "cut off", False, None
        times: list[float] = []
        try:
            async for message in self._stub.Generate(request, timeout=timeout):
                has_started = True
                times += [time.monotonic()] * len(message.chunk.token_ids)
                if message.HasField("finished"):
                    end = FINISHED
        except grpc.aio.AioRpcError as error:
            end, retry_delay = error.code().name, retry_delay_of(error)
        outcomes.add(end, times, began, has_started=has_started, retry_delay=retry_delay)


def retry_delay_of(error: grpc.aio.AioRpcError) -> float | None:
    """Seconds, of the RetryInfo in a status's details; None if it has none."""
    info = RetryInfo()
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            for detail in Status.FromString(value).details:
                if detail.Unpack(info):
                    return info.retry_delay.ToMilliseconds() / 1000
    return None


async def closed_loop(sender: Sender, concurrency: int, *, warm_up: float, seconds: float) -> Outcomes:
    """So many clients, each of which sends its next request when the one before has ended."""
    began = time.monotonic() + warm_up
    outcomes = Outcomes(began, began + seconds)

    async def client() -> None:
        while time.monotonic() < outcomes.ended:
            await sender.send(outcomes)

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return outcomes


async def open_loop(sender: Sender, rate: float, choose: random.Random, *, warm_up: float, seconds: float) -> Outcomes:
    """Requests come as they come (Poisson), so many a second, whatever becomes of them."""
    next_at = time.monotonic()
    outcomes = Outcomes(next_at + warm_up, next_at + warm_up + seconds)
    sending: set[asyncio.Task[None]] = set()
    while (now := time.monotonic()) < outcomes.ended:
        while next_at <= now:
            task = asyncio.create_task(sender.send(outcomes))
            sending.add(task)
            task.add_done_callback(sending.discard)
            next_at += choose.expovariate(rate)
        await asyncio.sleep(max(next_at - time.monotonic(), 0.002))
    await asyncio.gather(*sending)
    return outcomes
