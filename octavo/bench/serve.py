"""Measures a running server as its clients see it."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from octavo.bench.arrivals import Arrivals
from octavo.bench.backends.base import Backend, Served
from octavo.bench.datasets.request import BenchRequest, Dataset
from octavo.bench.goodput import RequestLimits
from octavo.bench.workload import random_prompts, random_texts
from octavo.client.errors import InvalidRequest
from octavo.reports import Report, RequestTrace

# For servers that do not tell theirs: smaller than most models'.
DEFAULT_VOCAB_SIZE = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests to send. rate: per second, arriving at random; inf: all at once. arrivals: instead of rate.
    concurrency: most requests in flight at once; 0: no limit. vocab_size: token ids in prompts are below; 0: the
    model's. dataset: instead of prompts and outputs of one length. Its times count if the rate is inf; speed: how many
    times as fast. limits: those of goodput."""

    num_requests: int
    rate: float = math.inf
    arrivals: Arrivals | None = None
    concurrency: int = 0
    prompt_len: int = 128
    output_len: int = 128
    seed: int = 0
    vocab_size: int = 0
    dataset: Dataset | None = None
    speed: float = 1.0
    limits: RequestLimits | None = None


async def measure(load: Load, backend: Backend, on_done: Callable[[RequestTrace], None]) -> Report:
    """Sends the load and waits until all requests have ended. on_done: called with each request that ended.

    A failed request is counted, not raised. Raises OctavoError if the server cannot take such requests at all, and
    DatasetError.
    """
    async with backend:
        served = await backend.served()
        requests, num_left_out = _requests(load, served, backend)
        arrivals = _arrivals(load, requests)
        places = asyncio.Semaphore(load.concurrency or len(requests))
        start, cpu_start = time.perf_counter(), time.process_time()

        async def one(index: int) -> RequestTrace:
            request = requests[index]
            await asyncio.sleep(start + arrivals[index] - time.perf_counter())
            async with places:
                trace = await backend.complete(request.prompt, load.seed + index, request.output_len)
            on_done(trace)
            return trace

        traces = await asyncio.gather(*map(one, range(len(requests))))
        cpu = time.process_time() - cpu_start
    return _report(load, served, backend, requests, num_left_out, traces, cpu)


def _requests(load: Load, served: Served, backend: Backend) -> tuple[list[BenchRequest], int]:
    """Returns the requests, and how many of a dataset are left out because the model can't take them."""
    vocab_size = load.vocab_size or served.vocab_size or DEFAULT_VOCAB_SIZE
    if load.dataset is None:
        if served.max_model_len and load.prompt_len + load.output_len > served.max_model_len:
            raise InvalidRequest(
                f"prompt_len={load.prompt_len} and output_len={load.output_len} exceed "
                f"max_model_len={served.max_model_len}"
            )
        if backend.takes_text:
            prompts = [*random_texts(load.num_requests, load.prompt_len, load.seed)]
        else:
            prompts = [*random_prompts(load.num_requests, load.prompt_len, vocab_size, load.seed)]
        return [
            BenchRequest(prompt=prompt, prompt_len=load.prompt_len, output_len=load.output_len) for prompt in prompts
        ], 0
    found = load.dataset.requests(load.num_requests, load.seed, vocab_size=vocab_size, as_text=backend.takes_text)
    fitting = [
        each for each in found if not served.max_model_len or each.prompt_len + each.output_len <= served.max_model_len
    ]
    if not fitting:
        shortest = min(each.prompt_len + each.output_len for each in found)
        raise InvalidRequest(
            f"every request of the dataset exceeds max_model_len={served.max_model_len}: the shortest has {shortest} "
            "tokens with its output"
        )
    return fitting, len(found) - len(fitting)


def _arrivals(load: Load, requests: Sequence[BenchRequest]) -> list[float]:
    process = load.arrivals or Arrivals(rate=load.rate)
    if process.rate == math.inf and all(each.at is not None for each in requests):
        return [(each.at or 0.0) / load.speed for each in requests]
    return process.times(len(requests), load.seed)


def _report(
    load: Load,
    served: Served,
    backend: Backend,
    requests: Sequence[BenchRequest],
    num_left_out: int,
    traces: list[RequestTrace],
    cpu: float,
) -> Report:
    duration = max(t.ended for t in traces) - min(t.began for t in traces)
    rate = load.arrivals.rate if load.arrivals else load.rate
    extra: dict[str, object] = {
        "request_rate": "inf" if rate == math.inf else rate,
        **backend.told,
        # Near 1, this process is the limit, not the server.
        "client_cpu": round(cpu / duration, 3),
    }
    if load.arrivals and load.arrivals.burstiness != 1:
        extra["burstiness"] = load.arrivals.burstiness
    if load.arrivals and load.arrivals.ramp:
        extra |= {"ramp": str(load.arrivals.ramp), "ramp_to": load.arrivals.ramp_to}
    if load.dataset is not None:
        extra["dataset"] = load.dataset.name
        if num_left_out:
            extra["num_too_long"] = num_left_out
    if load.limits is not None:
        extra |= load.limits.as_json(traces, duration)
    return Report(
        engine=served.engine,
        model=served.name,
        dtype=served.dtype,
        concurrency=min(load.concurrency or len(requests), len(requests)),
        prompt_len=backend.num_prompt_tokens or round(float(np.mean([each.prompt_len for each in requests]))),
        output_len=round(float(np.mean([each.output_len for each in requests]))),
        duration=duration,
        traces=traces,
        extra=extra,
    )
