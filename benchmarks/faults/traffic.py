"""Requests of well and badly behaved clients: they finish, cancel, run out of time, read slowly, or vanish.

Each function is one request of one client. It returns a word for how the request ended, and raises Surprise if it ended
in a way that it must not.
"""

import asyncio
import contextlib
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from benchmarks.faults.grey.means.relay import Relay
from octavo import AsyncClient, SamplingParams
from octavo.client.errors import Cancelled, DeadlineExceeded, OctavoError, Overloaded
from octavo.client.results import Delta, Finished

_PATIENCE_S = 120.0


async def post(port: int, path: str, body: bytes, *, leaves_after: int | None = None) -> tuple[int, bytes]:
    """Status and body of a POST; status 0 if the connection broke before there was one.

    leaves_after: bytes of the answer after which the connection is reset.
    """
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    answer = await exchange(port, head.encode() + body, leaves_after=leaves_after)
    line, _, rest = answer.partition(b"\r\n")
    words = line.split()
    return (int(words[1]) if len(words) > 1 else 0), rest.partition(b"\r\n\r\n")[2]


async def exchange(
    port: int, data: bytes, *, leaves_after: int | None = None, patience_s: float = _PATIENCE_S
) -> bytes:
    """Sends bytes. Returns what the server answers until the connection ends or breaks or `patience_s` have passed."""
    answer = b""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return answer
    try:
        async with asyncio.timeout(patience_s):
            writer.write(data)
            while leaves_after is None or len(answer) < leaves_after:
                piece = await reader.read(4096)
                if not piece:
                    break
                answer += piece
    except (OSError, TimeoutError):
        return answer
    finally:
        writer.transport.abort()
    return answer


# The longest that a request takes when processes are killed under it.
PATIENCE_S = 120.0
_NUM_PREFIXES, _LONGEST_PREFIX = 4, 160
_FIRST_ID, _LAST_ID = 100, 40_000


Manner = Callable[["Edge", random.Random], Awaitable[str]]


class Surprise(Exception):
    """A request ended in a way that its kind must not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Addresses of a cluster: for each router, the gRPC target and the port of its HTTP server."""

    targets: list[str]
    http_ports: list[int]

    def client(self, choose: random.Random, *, retry_for: float = PATIENCE_S) -> AsyncClient:
        """Makes a client that begins with a random router, and knows all."""
        first = choose.randrange(len(self.targets))
        return AsyncClient([*self.targets[first:], *self.targets[:first]], retry_for=retry_for)


def a_prompt(choose: random.Random) -> list[int]:
    """Random token ids; many prompts share a prefix."""
    prefix = choose.randrange(2 * _NUM_PREFIXES)
    shared = random.Random(prefix)
    length = shared.randint(40, _LONGEST_PREFIX) if prefix < _NUM_PREFIXES else 0
    head = [shared.randrange(_FIRST_ID, _LAST_ID) for _ in range(length)]
    return head + [choose.randrange(_FIRST_ID, _LAST_ID) for _ in range(choose.randint(1, 40))]


def some_sampling(choose: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=choose.choice([0.0, 0.9]),
        n=choose.choice([1, 1, 1, 3]),
        max_tokens=choose.randint(1, 40),
        logprobs=choose.choice([None, None, None, 5]),
        prompt_logprobs=choose.choice([None] * 9 + [1]),
        stop=choose.choice([(), (), (), "a"]),
        ignore_eos=choose.random() < 0.5,
    )


async def finish(edge: Edge, choose: random.Random) -> str:
    async with edge.client(choose) as client:
        generation = await client.generate(a_prompt(choose), some_sampling(choose))
    return "finished" if generation.num_resumes == 0 else "finished, resumed"


async def leave(edge: Edge, choose: random.Random) -> str:
    """Ends its own gRPC call after some pieces."""
    num_pieces = choose.randint(0, 12)
    async with edge.client(choose) as client, client.stream(a_prompt(choose), some_sampling(choose)) as stream:
        async for event in stream:
            if isinstance(event, Finished):
                return "finished"
            num_pieces -= isinstance(event, Delta)
            if num_pieces <= 0:
                break
    return "left"


async def cancel(edge: Edge, choose: random.Random) -> str:
    """Ends the stream by another call, Cancel."""
    async with edge.client(choose) as client, client.stream(a_prompt(choose), some_sampling(choose)) as stream:
        with contextlib.suppress(Cancelled):
            async for event in stream:
                if isinstance(event, Delta):
                    try:
                        await client.cancel(stream.request_id)
                    except OctavoError:
                        # The only router that knows the stream is being killed.
                        return "could not cancel"
            return "finished"
    return "cancelled"


async def run_out_of_time(edge: Edge, choose: random.Random) -> str:
    async with edge.client(choose) as client:
        try:
            await client.generate(a_prompt(choose), some_sampling(choose), timeout=choose.uniform(0.02, 4.0))
        except DeadlineExceeded:
            return "too late"
    return "finished"


async def read_slowly(edge: Edge, choose: random.Random) -> str:
    """Stops reading once tokens come, so that many logprobs fill the buffers on the way; then reads on, or leaves."""
    sampling = SamplingParams(max_tokens=60, n=4, logprobs=20, prompt_logprobs=20, ignore_eos=True)
    prompt = [choose.randrange(_FIRST_ID, _LAST_ID) for _ in range(choose.randint(150, 300))]
    async with edge.client(choose, retry_for=0) as client, client.stream(prompt, sampling) as stream:
        try:
            async for event in stream:
                if isinstance(event, Delta):
                    break
            await asyncio.sleep(choose.uniform(1.0, 6.0))
            if choose.random() < 0.3:
                return "left"
            async for _ in stream:
                pass
        except Overloaded:
            return "too slow"
        except OctavoError:
            # The stream's router was killed.
            return "broken"
    return "finished"


async def vanish(edge: Edge, choose: random.Random) -> str:
    """Breaks the client's connections, in the middle of a stream or before."""
    target = choose.choice(edge.targets)
    async with Relay.to(target) as relay, AsyncClient(relay.address, retry_for=0) as client:
        task = asyncio.create_task(client.generate(a_prompt(choose), some_sampling(choose)))
        await asyncio.wait([task], timeout=choose.uniform(0.01, 1.5))
        relay.end()
        with contextlib.suppress(OctavoError):
            await task
            return "finished"
    return "vanished"


async def call_over_http(edge: Edge, choose: random.Random) -> str:
    """Asks for a completion through the gateway, streamed or not; some clients leave in the middle."""
    is_streamed = choose.random() < 0.7
    body = {"prompt": a_prompt(choose), "max_tokens": choose.randint(1, 40), "stream": is_streamed}
    leaves_after = choose.randint(0, 600) if choose.random() < 0.3 else None
    port = choose.choice(edge.http_ports)
    status, answer = await post(port, "/v1/completions", json.dumps(body).encode(), leaves_after=leaves_after)
    if leaves_after is not None:
        return "left"
    if status == 200 and (not is_streamed or b"data: [DONE]" in answer):
        return "finished"
    # The router was killed or has no replica: HTTP clients do not resume by themselves.
    if status in (0, 200, 503):
        return "broken"
    raise Surprise(f"HTTP status {status}: {answer[:300]!r}")


# Weights of the kinds of requests.
MANNERS: dict[Manner, int] = {
    finish: 30,
    leave: 12,
    cancel: 8,
    run_out_of_time: 12,
    read_slowly: 4,
    vanish: 8,
    call_over_http: 14,
}
