"""An HTTP client for servers that stream tokens as server-sent events, light enough to share their cores."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.reports import RequestTrace

# A line holds one event; some servers repeat the prompt in the first one.
_LINE_LIMIT = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """One server's API for a stream of tokens. tokens_after(event, before): the number of tokens so far, with those of
    the event, if `before` came before it."""

    path: str
    body: Callable[[Sequence[int], int], Mapping[str, Any]]
    tokens_after: Callable[[Mapping[str, Any], int], int]


async def measure(
    port: int, api: Api, prompts: Sequence[Sequence[int]], output: int, concurrency: int
) -> list[RequestTrace]:
    """Sends a request for each prompt, as soon as fewer than `concurrency` are in flight."""
    places = asyncio.Semaphore(concurrency)

    async def one(prompt: Sequence[int]) -> RequestTrace:
        async with places:
            return await complete(port, api, prompt, output)

    return await asyncio.gather(*map(one, prompts))


async def complete(port: int, api: Api, prompt: Sequence[int], output: int) -> RequestTrace:
    """Sends one request. A failure is in the trace."""
    trace = await _send(port, api, api.body(prompt, output))
    if not trace.error and trace.num_tokens != output:
        trace.error = f"{trace.num_tokens} output tokens came, not {output}"
    return trace


async def _send(port: int, api: Api, body: Mapping[str, Any]) -> RequestTrace:
    content = json.dumps(body).encode()
    trace = RequestTrace(began=time.perf_counter(), token_times=[], token_counts=[])
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=_LINE_LIMIT)
    head = f"POST {api.path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    status = await reader.readline()
    if b" 200 " not in status:
        trace.error = f"{status.decode().strip()}: {(await reader.read()).decode(errors='replace')[-500:]}"
    total = 0
    # Each event is sent as one HTTP chunk; chunk sizes and empty lines stand between the events.
    async for line in reader:
        if not line.startswith(b"data: {"):
            continue
        before, total = total, api.tokens_after(json.loads(line[6:]), total)
        if total > before:
            trace.token_times.append(time.perf_counter())
            trace.token_counts.append(total - before)
    writer.close()
    await writer.wait_closed()
    trace.ended = time.perf_counter()
    return trace
