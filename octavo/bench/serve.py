"""Measures a running server as its clients see it."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from octavo.bench.backends.base import Backend, Prompt, Served
from octavo.bench.workload import arrival_times, random_prompts, random_texts
from octavo.client.errors import InvalidRequest
from octavo.reports import Report, RequestTrace

# For servers that do not tell theirs: smaller than most models'.
DEFAULT_VOCAB_SIZE = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests to send. rate: per second, arriving at random; inf: all at once. concurrency: most requests in
    flight at once; 0: no limit. vocab_size: token ids in prompts are below; 0: the model's."""

    num_requests: int
    rate: float
    concurrency: int = 0
    prompt_len: int = 128
    output_len: int = 128
    seed: int = 0
    vocab_size: int = 0


async def measure(load: Load, backend: Backend, on_done: Callable[[RequestTrace], None]) -> Report:
    """Sends the load and waits until all requests have ended. on_done: called with each request that ended.

    A failed request is counted, not raised. Raises OctavoError if the server cannot take such requests at all.
    """
    async with backend:
        served = await backend.served()
        if served.max_model_len and load.prompt_len + load.output_len > served.max_model_len:
            raise InvalidRequest(
                f"prompt_len={load.prompt_len} and output_len={load.output_len} exceed "
                f"max_model_len={served.max_model_len}"
            )
        prompts = _prompts(load, served, backend)
        arrivals = arrival_times(load.num_requests, load.rate, load.seed)
        places = asyncio.Semaphore(load.concurrency or load.num_requests)
        start, cpu_start = time.perf_counter(), time.process_time()

        async def one(index: int) -> RequestTrace:
            await asyncio.sleep(start + arrivals[index] - time.perf_counter())
            async with places:
                trace = await backend.complete(prompts[index], load.seed + index, load.output_len)
            on_done(trace)
            return trace

        traces = await asyncio.gather(*map(one, range(load.num_requests)))
        cpu = time.process_time() - cpu_start
    return _report(load, served, backend, traces, cpu)


def _prompts(load: Load, served: Served, backend: Backend) -> list[Prompt]:
    if backend.takes_text:
        return [*random_texts(load.num_requests, load.prompt_len, load.seed)]
    vocab_size = load.vocab_size or served.vocab_size or DEFAULT_VOCAB_SIZE
    return [*random_prompts(load.num_requests, load.prompt_len, vocab_size, load.seed)]


def _report(load: Load, served: Served, backend: Backend, traces: list[RequestTrace], cpu: float) -> Report:
    duration = max(t.ended for t in traces) - min(t.began for t in traces)
    extra: dict[str, object] = {
        "request_rate": "inf" if load.rate == float("inf") else load.rate,
        **backend.told,
        # Near 1, this process is the limit, not the server.
        "client_cpu": round(cpu / duration, 3),
    }
    return Report(
        engine=served.engine,
        model=served.name,
        dtype=served.dtype,
        concurrency=min(load.concurrency or load.num_requests, load.num_requests),
        prompt_len=backend.num_prompt_tokens or load.prompt_len,
        output_len=load.output_len,
        duration=duration,
        traces=traces,
        extra=extra,
    )
