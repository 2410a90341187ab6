"""Sends requests to a router by raw calls, in closed and open loops, and records the outcome of each.

The sender never retries and ignores retry delays. Prompts are token ids, so that the sender takes little CPU time from
what it measures.
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

# Ordinary tokens of SmolLM2; its first ones are special.
_TOKENS = range(100, 40_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The shape of every request. deadlines: least and most seconds, given by a share of them; None: by none."""

    num_prompt_tokens: int = 16
    num_output_tokens: int = 16
    deadlines: tuple[float, float] | None = None
    share_with_deadline: float = 0.5


@dataclass(slots=True)
class Outcomes:
    """The outcomes in a stretch of time, from `began` to `ended` on time.monotonic(). Other times are in seconds.

    A token counts when it comes, if its request finishes (in time, if it has a deadline), even after the stretch.
    Requests that begin together end together, so counting whole requests would add or miss such a crowd.
    """

    began: float = 0.0
    ended: float = inf
    num_tokens: int = 0
    # Ended requests by "finished" or the name of a status.
    ends: Counter[str] = field(default_factory=Counter)
    # Seconds that refusals asked clients to wait; number of refusals without RetryInfo.
    retry_delays: list[float] = field(default_factory=list)
    num_without_retry_info: int = 0
    # Refused by a scheduler, after the router had sent Started.
    num_refused_late: int = 0
    # Time that each refusal took.
    refusal_seconds: list[float] = field(default_factory=list)
    # Time that each finished request took.
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
        """Records a request that ends now. times: of its tokens."""
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

    def __init__(self, stub: InferenceStub, shape: Shape, choose: random.Random, *, api_key: str = "") -> None:
        """api_key: empty: none is sent."""
        self.shape = shape
        self._metadata = (("x-api-key", api_key),) if api_key else None
        self._stub, self._choose = stub, choose

    async def send(self, outcomes: Outcomes) -> None:
        """Sends one request and waits for its end."""
        shape, choose = self.shape, self._choose
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=choose.choices(_TOKENS, k=shape.num_prompt_tokens)),
            sampling=pb.SamplingParams(temperature=0.0, max_tokens=shape.num_output_tokens, ignore_eos=True),
        )
        deadlines = shape.deadlines
        has_deadline = deadlines is not None and choose.random() < shape.share_with_deadline
        timeout = choose.uniform(*deadlines) if deadlines is not None and has_deadline else None
        began, end, has_started, retry_delay = time.monotonic(), "cut off", False, None
        times: list[float] = []
        try:
            async for message in self._stub.Generate(request, timeout=timeout, metadata=self._metadata):
                has_started = True
                times += [time.monotonic()] * len(message.chunk.token_ids)
                if message.HasField("finished"):
                    end = FINISHED
        except grpc.aio.AioRpcError as error:
            end, retry_delay = error.code().name, retry_delay_of(error)
        outcomes.add(end, times, began, has_started=has_started, retry_delay=retry_delay)


def retry_delay_of(error: grpc.aio.AioRpcError) -> float | None:
    """The delay in seconds of the RetryInfo in a status's details; None if it has none."""
    info = RetryInfo()
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            for detail in Status.FromString(value).details:
                if detail.Unpack(info):
                    return info.retry_delay.ToMilliseconds() / 1000
    return None


async def closed_loop(sender: Sender, concurrency: int, *, warm_up: float, seconds: float) -> Outcomes:
    """Runs `concurrency` clients, each of which sends its next request when the previous one has ended."""
    began = time.monotonic() + warm_up
    outcomes = Outcomes(began, began + seconds)

    async def client() -> None:
        while time.monotonic() < outcomes.ended:
            await sender.send(outcomes)

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return outcomes


async def open_loop(sender: Sender, rate: float, choose: random.Random, *, warm_up: float, seconds: float) -> Outcomes:
    """Sends `rate` requests a second at random times (Poisson), whatever becomes of earlier ones."""
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
