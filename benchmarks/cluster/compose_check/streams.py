"""Streams of the same requests through gRPC and HTTP, whose tokens are compared between runs."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import httpx

from octavo import AsyncClient, SamplingParams
from octavo.client.results import Delta

_TOKENS = 300
# Pieces of each stream after which it is in its middle.
_UNDER_WAY = 30
_PATIENCE_S = 180.0
_PROMPTS = ("The lighthouse keeper wrote in his diary that", "A short history of the bicycle:")
# Drawn tokens show a wrong seed or position that greedy ones may hide.
_TEMPERATURES = (0.0, 0.8)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """One stream. result: token ids (gRPC) or text (HTTP). pause_s: the longest time between two pieces."""

    name: str
    result: tuple[int, ...] | str = ()
    num_pieces: int = 0
    pause_s: float = 0.0
    error: str = ""
    _last: float = field(default=0.0)

    def note_piece(self) -> None:
        now = time.monotonic()
        if self.num_pieces:
            self.pause_s = max(self.pause_s, now - self._last)
        self._last, self.num_pieces = now, self.num_pieces + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Published ports on loopback."""

    grpc: int
    http: int
    metrics: int


async def run_streams(ports: Ports, disturb: Callable[[], None] | None = None) -> list[Outcome]:
    """Runs two streams through gRPC and two through HTTP at once. Calls `disturb`, in a thread, when all are in their
    middle; raises RuntimeError if one has ended by then."""
    outcomes = [Outcome(name=f"{kind} {i}") for i in range(len(_PROMPTS)) for kind in ("gRPC", "HTTP")]
    async with (
        AsyncClient(f"127.0.0.1:{ports.grpc}", retry_for=_PATIENCE_S) as grpc_client,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{ports.http}", timeout=_PATIENCE_S) as http_client,
        asyncio.timeout(2 * _PATIENCE_S),
        asyncio.TaskGroup() as tasks,
    ):
        running = [
            tasks.create_task(stream)
            for i in range(len(_PROMPTS))
            for stream in (
                _stream_grpc(grpc_client, i, outcomes[2 * i]),
                _stream_http(http_client, i, outcomes[2 * i + 1]),
            )
        ]
        if disturb is not None:
            while any(outcome.num_pieces < _UNDER_WAY for outcome in outcomes):
                if any(task.done() for task in running):
                    raise RuntimeError(f"a stream ended before the disturbance: {outcomes}")
                await asyncio.sleep(0.02)
            await asyncio.to_thread(disturb)
    return outcomes


async def _stream_grpc(client: AsyncClient, index: int, outcome: Outcome) -> None:
    params = SamplingParams(max_tokens=_TOKENS, ignore_eos=True, temperature=_TEMPERATURES[index], seed=index + 1)
    async with client.stream(_PROMPTS[index], params) as stream:
        async for event in stream:
            if isinstance(event, Delta):
                outcome.note_piece()
    outcome.result = stream.generation.choices[0].token_ids


async def _stream_http(client: httpx.AsyncClient, index: int, outcome: Outcome) -> None:
    """A broken connection is an outcome, not an exception: HTTP has no resumption."""
    body = {
        "model": "",
        "prompt": _PROMPTS[index],
        "max_tokens": _TOKENS,
        "ignore_eos": True,
        "stream": True,
        "temperature": _TEMPERATURES[index],
        "seed": index + 1,
    }
    text, ended = "", False
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                data = line.removeprefix("data: ")
                if not line or data == line:
                    continue
                if data == "[DONE]":
                    ended = True
                    continue
                event = json.loads(data)
                if "error" in event:
                    outcome.error = str(event["error"])
                    return
                text += event["choices"][0]["text"]
                outcome.note_piece()
    except httpx.HTTPError as error:
        outcome.error = f"{type(error).__name__}: {error}"
        return
    if not ended:
        outcome.error = "the stream ended without [DONE]"
    outcome.result = text


def differences(expected: Sequence[Outcome], found: Sequence[Outcome]) -> list[str]:
    """One line for each stream that failed or differs from the undisturbed one."""
    lines: list[str] = []
    for before, after in zip(expected, found, strict=True):
        if after.error:
            lines.append(f"{after.name}: {after.error}")
        elif before.result != after.result:
            lines.append(f"{after.name}: other tokens")
    return lines
