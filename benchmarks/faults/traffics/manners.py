"""Requests of well and badly behaved clients: they finish, cancel, run out of time, read slowly, vanish, or send what
is invalid, too large, or no message at all; and requests with images.

Each function is one request of one client. It returns a word for how the request ended, and raises Surprise if it ended
in a way that it must not.
"""

import asyncio
import base64
import contextlib
import functools
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import grpc.aio

from benchmarks.faults.means.relay import Relay
from octavo import AsyncClient, SamplingParams
from octavo.client.errors import (
    Cancelled,
    DeadlineExceeded,
    DuplicateRequest,
    InvalidRequest,
    ModelNotFound,
    OctavoError,
    Overloaded,
    Superseded,
)
from octavo.client.requests import Message, Prompt, RequestOptions
from octavo.client.results import Delta, Finished

# Option max_message_bytes of the cluster: small, so that a message that is too large costs little.
MAX_MESSAGE_BYTES = 2**20
# Option item_memory of a cluster for images, GiB: less than the files of all clients together, so that requests also
# come when there is no room.
ITEM_MEMORY = 0.005
# The longest that a request takes when processes are killed under it.
PATIENCE_S = 120.0


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


async def exchange(port: int, data: bytes, *, leaves_after: int | None = None, patience_s: float = PATIENCE_S) -> bytes:
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


_NUM_PREFIXES, _LONGEST_PREFIX = 4, 160
_FIRST_ID, _LAST_ID = 100, 40_000

Manner = Callable[["Edge", random.Random], Awaitable[str]]


class Surprise(Exception):
    """A request ended in a way that its kind must not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Addresses of a cluster: for each router, the gRPC target and the port of its HTTP server. has_images: requests
    have images, and may be refused because there is no room for them."""

    targets: list[str]
    http_ports: list[int]
    has_images: bool = False

    def prompt(self, choose: random.Random) -> Prompt:
        return a_chat(choose) if self.has_images else a_prompt(choose)

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
        generation = await client.generate(edge.prompt(choose), some_sampling(choose))
    return "finished" if generation.num_resumes == 0 else "finished, resumed"


async def leave(edge: Edge, choose: random.Random) -> str:
    """Ends its own gRPC call after some pieces."""
    num_pieces = choose.randint(0, 12)
    async with edge.client(choose) as client, client.stream(edge.prompt(choose), some_sampling(choose)) as stream:
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
        task = asyncio.create_task(client.generate(edge.prompt(choose), some_sampling(choose)))
        await asyncio.wait([task], timeout=choose.uniform(0.005, 1.5))
        relay.end()
        with contextlib.suppress(OctavoError):
            await task
            return "finished"
    return "vanished"


async def call_over_http(edge: Edge, choose: random.Random) -> str:
    """Asks through the gateway, streamed or not; some clients leave in the middle."""
    is_streamed = choose.random() < 0.7
    body: dict[str, Any] = {"max_tokens": choose.randint(1, 40), "stream": is_streamed}
    if edge.has_images:
        path = "/v1/chat/completions"
        url = f"data:;base64,{base64.b64encode(a_file(choose)).decode()}"
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}]
        body["messages"] = [{"role": "user", "content": content}]
    else:
        path, body["prompt"] = "/v1/completions", a_prompt(choose)
    leaves_after = choose.randint(0, 600) if choose.random() < 0.3 else None
    port = choose.choice(edge.http_ports)
    status, answer = await post(port, path, json.dumps(body).encode(), leaves_after=leaves_after)
    if leaves_after is not None:
        return "left"
    if status == 200 and (not is_streamed or b"data: [DONE]" in answer):
        return "finished"
    # The router was killed or has no replica: HTTP clients do not resume by themselves.
    if status in (0, 200, 503):
        return "broken"
    if status == 429 and edge.has_images:
        return "no room"
    raise Surprise(f"HTTP status {status}: {answer[:300]!r}")


# --- Bad input

_VALID = SamplingParams(max_tokens=4)
_INVALID: tuple[tuple[Prompt, SamplingParams, RequestOptions, type[OctavoError]], ...] = (
    ([5], replace(_VALID, temperature=-1.0), {}, InvalidRequest),
    ([5], replace(_VALID, top_p=2.0), {}, InvalidRequest),
    ([5], replace(_VALID, n=2**20), {}, InvalidRequest),
    ([5], replace(_VALID, logprobs=10_000), {}, InvalidRequest),
    ([5], replace(_VALID, logit_bias={2**31 - 1: 1.0}), {}, InvalidRequest),
    ([5], replace(_VALID, stop=["x" * 100_000]), {}, InvalidRequest),
    ([], _VALID, {}, InvalidRequest),
    ([2**31], _VALID, {}, InvalidRequest),
    ([5] * 100_000, _VALID, {}, InvalidRequest),
    ([{"role": "", "content": "\0"}] * 2, replace(_VALID, max_tokens=2**31), {}, InvalidRequest),
    ([5], _VALID, {"model": "another"}, ModelNotFound),
)
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
# The client leaves a server that waits for more bytes after this time.
_SHORT_S = 1.0


async def ask_for_the_impossible(edge: Edge, choose: random.Random) -> str:
    prompt, sampling, options, error = choose.choice(_INVALID)
    async with edge.client(choose) as client:
        try:
            await client.generate(prompt, sampling, **options)
        except error:
            return "refused"
    raise Surprise(f"{sampling} with the prompt {str(prompt)[:200]} and {options} was served")


async def ask_twice(edge: Edge, choose: random.Random) -> str:
    """Repeats the id of a live request. The first call goes on."""
    async with (
        edge.client(choose) as client,
        client.stream(a_prompt(choose), SamplingParams(max_tokens=30, ignore_eos=True)) as stream,
    ):
        async for event in stream:
            if isinstance(event, Delta):
                break
        try:
            await client.generate([5], _VALID, request_id=stream.request_id)
        # Superseded: the stream has meanwhile moved elsewhere, as a higher attempt.
        except (DuplicateRequest, Superseded):
            return "refused"
        # Another router took the second call: ids are unique only within a router.
        return "left"


async def send_garbage(edge: Edge, choose: random.Random) -> str:
    """Sends random bytes as a gRPC message: not decodable, or too large."""
    size = choose.choice([1, 20, 300, 2 * MAX_MESSAGE_BYTES])
    method = choose.choice(["Generate", "GenerateOnce", "Tokenize", "Cancel", "NoSuchMethod"])
    async with grpc.aio.insecure_channel(choose.choice(edge.targets)) as channel:
        call = channel.unary_stream(f"/octavo.v1.Inference/{method}")
        try:
            async for _ in call(choose.randbytes(size), timeout=5.0):
                pass
        except grpc.aio.AioRpcError as error:
            return error.code().name.lower()
    # A few random bytes may well be a valid message with unknown fields.
    return "answered"


async def send_noise(edge: Edge, choose: random.Random) -> str:
    """Sends bytes that are not HTTP/2 to a gRPC port, or not HTTP to an HTTP port."""
    noise = choose.randbytes(choose.randint(1, 3000))
    port = choose.choice([int(target.rpartition(":")[2]) for target in edge.targets] + edge.http_ports)
    head = choose.choice([b"", _PREFACE, b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99999\r\n\r\n"])
    await exchange(port, head + noise, patience_s=_SHORT_S)
    return "ended"


async def send_bad_http(edge: Edge, choose: random.Random) -> str:
    port = choose.choice(edge.http_ports)
    path, body = choose.choice(
        [
            ("/v1/completions", b"{"),
            ("/v1/completions", b'{"prompt": [], "unknown": 1}'),
            ("/v1/completions", b'{"prompt": "x", "n": -1}'),
            ("/v1/completions", b"[" * 50_000),
            ("/v1/completions", b" " * (2 * MAX_MESSAGE_BYTES)),
            ("/v1/chat/completions", b'{"messages": [{"role": 7}]}'),
            ("/v1/nothing", b"{}"),
        ]
    )
    status, answer = await post(port, path, body)
    if status == 0 or 400 <= status < 500 or status == 503:
        return str(status) if status else "broken"
    raise Surprise(f"HTTP status {status} for {path} with {body[:40]!r}: {answer[:300]!r}")


async def connect_and_wait(edge: Edge, choose: random.Random) -> str:
    """Connects, sends nothing, and leaves."""
    port = choose.choice([int(target.rpartition(":")[2]) for target in edge.targets] + edge.http_ports)
    await exchange(port, b"", patience_s=choose.uniform(0.0, _SHORT_S))
    return "left"


# --- Images

_MOST_IMAGES = 3
_SIDES = (60, 420)
_NUM_FILES = 12
_SHARE_SHARED = 0.3


@functools.cache
def _files() -> tuple[bytes, ...]:
    from tests.support.models.vision_models import file_of, picture

    choose = random.Random(0)
    sizes = [(choose.randint(*_SIDES), choose.randint(*_SIDES)) for _ in range(_NUM_FILES)]
    return tuple(file_of(picture(*size, seed), ("PNG", "JPEG")[seed % 2]) for seed, size in enumerate(sizes))


def a_file(choose: random.Random) -> bytes:
    """Some files are in many requests; of the others, what follows the image makes each another item."""
    file = choose.choice(_files())
    return file if choose.random() < _SHARE_SHARED else file + choose.randbytes(16)


def a_chat(choose: random.Random, files: list[bytes] | None = None) -> list[Message]:
    files = files or [a_file(choose) for _ in range(choose.randint(1, _MOST_IMAGES))]
    content: list[object] = [{"type": "text", "text": f"{choose.randrange(100)}: "}]
    content += [{"type": "image", "image": file} for file in files]
    return [{"role": "user", "content": content}]


async def send_hostile(edge: Edge, choose: random.Random) -> str:
    """Sends what is no image, too many, or one that ends too early."""
    whole = a_file(choose)
    bomb = bytearray(_files()[0])
    bomb[16:24] = b"\0\1\0\0" * 2
    # A file that is cut in two has a header that routers accept; the worker refuses it.
    files = choose.choice([[whole] * 4, [b"<svg/>"], [bytes(bomb)], [whole, whole[: len(whole) // 2]]])
    async with edge.client(choose) as client:
        try:
            await client.generate(a_chat(choose, files), some_sampling(choose))
        except InvalidRequest:
            return "refused"
    raise Surprise(f"{len(files)} files, the last one of {len(files[-1])} bytes, were served")


# Weights of the kinds of requests.
GOOD: dict[Manner, int] = {
    finish: 30,
    leave: 12,
    cancel: 8,
    run_out_of_time: 12,
    read_slowly: 4,
    vanish: 8,
    call_over_http: 14,
}
BAD: dict[Manner, int] = {
    ask_for_the_impossible: 8,
    ask_twice: 3,
    send_garbage: 4,
    send_noise: 4,
    send_bad_http: 4,
    connect_and_wait: 2,
}
WITH_IMAGES: dict[Manner, int] = {finish: 30, leave: 14, vanish: 8, send_hostile: 12, call_over_http: 14}
