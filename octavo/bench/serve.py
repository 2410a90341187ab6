"""Measures a running cluster as its clients see it.

It calls the gRPC stub directly rather than AsyncClient: the measured cluster may run on this machine, and a client that
keeps results costs more than one that counts tokens.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from octavo.bench.workload import arrival_times, random_prompts
from octavo.client.async_client import AsyncClient
from octavo.client.connection import CHANNEL_OPTIONS
from octavo.client.errors import InvalidRequest, OctavoError, from_rpc_error
from octavo.client.results import ModelInfo
from octavo.reports import Report, RequestTrace
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as rpc


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests to send. rate: per second, arriving at random; inf: all at once. concurrency: most requests in
    flight at once; 0: no limit."""

    target: str
    num_requests: int
    rate: float
    concurrency: int = 0
    prompt_len: int = 128
    output_len: int = 128
    seed: int = 0


async def measure(load: Load, on_done: Callable[[RequestTrace], None]) -> Report:
    """Sends the load and waits until all requests have ended. on_done: called with each request that ended.

    A failed request is counted, not raised. Raises OctavoError if the cluster cannot take such requests at all.
    """
    async with AsyncClient(load.target, retry_for=0.0) as client:
        model = await client.model()
    if load.prompt_len + load.output_len > model.max_model_len:
        raise InvalidRequest(
            f"prompt_len={load.prompt_len} and output_len={load.output_len} exceed max_model_len={model.max_model_len}"
        )
    prompts = random_prompts(load.num_requests, load.prompt_len, model.vocab_size, load.seed)
    arrivals = arrival_times(load.num_requests, load.rate, load.seed)
    places = asyncio.Semaphore(load.concurrency or load.num_requests)
    async with grpc.aio.insecure_channel(load.target, options=CHANNEL_OPTIONS) as channel:
        # The generated stub's types are those of synchronous channels.
        stub: Any = rpc.InferenceStub(channel)
        start = time.perf_counter()

        async def one(index: int) -> RequestTrace:
            await asyncio.sleep(start + arrivals[index] - time.perf_counter())
            async with places:
                trace = await _send(stub, _request(load, prompts[index], index))
            on_done(trace)
            return trace

        traces = await asyncio.gather(*map(one, range(load.num_requests)))
    return _report(load, model, traces)


def _report(load: Load, model: ModelInfo, traces: list[RequestTrace]) -> Report:
    return Report(
        model=model.name,
        dtype=model.dtype,
        concurrency=min(load.concurrency or load.num_requests, load.num_requests),
        prompt_len=load.prompt_len,
        output_len=load.output_len,
        duration=max(t.ended for t in traces) - min(t.began for t in traces),
        traces=traces,
        extra={"request_rate": "inf" if load.rate == float("inf") else load.rate},
    )


def _request(load: Load, prompt: list[int], index: int) -> pb.GenerateRequest:
    """A greedy request for exactly output_len tokens."""
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt))
    sampling = request.sampling
    sampling.temperature, sampling.seed, sampling.ignore_eos = 0.0, load.seed + index, True
    sampling.max_tokens = sampling.min_tokens = load.output_len
    return request


async def _send(stub: Any, request: pb.GenerateRequest) -> RequestTrace:
    trace = RequestTrace(began=time.perf_counter(), token_times=[], token_counts=[])
    try:
        async for message in stub.Generate(request):
            if message.HasField("chunk") and message.chunk.token_ids:
                trace.token_times.append(time.perf_counter())
                trace.token_counts.append(len(message.chunk.token_ids))
    except grpc.RpcError as error:
        failed: OctavoError = from_rpc_error(error)
        trace.error = f"{type(failed).__name__}: {failed}"
    trace.ended = time.perf_counter()
    if not trace.error and trace.num_tokens != request.sampling.max_tokens:
        trace.error = f"{trace.num_tokens} output tokens came, not {request.sampling.max_tokens}"
    return trace
