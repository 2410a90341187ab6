"""Bad input: invalid requests, bytes that are no message, messages that are too large.

As in `benchmarks.faults.traffic`, each function is one request; it raises Surprise if the request is not refused.
"""

import random
from dataclasses import replace

import grpc.aio

from benchmarks.faults.traffic import Edge, Manner, Surprise, a_prompt, exchange, post
from octavo import SamplingParams
from octavo.client.errors import DuplicateRequest, InvalidRequest, ModelNotFound, OctavoError, Superseded
from octavo.client.requests import Prompt, RequestOptions
from octavo.client.results import Delta

# Option max_message_bytes of the cluster: small, so that a message that is too large costs little.
MAX_MESSAGE_BYTES = 2**20
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


MANNERS: dict[Manner, int] = {
    ask_for_the_impossible: 8,
    ask_twice: 3,
    send_garbage: 4,
    send_noise: 4,
    send_bad_http: 4,
    connect_and_wait: 2,
}
