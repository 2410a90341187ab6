"""Measures what long prompts do to the streams beside them, with inter_token_latency_target and without.

    python -m benchmarks.scheduler.long_prompts                                  64, 32 and 8 streams, target 200 ms
    python -m benchmarks.scheduler.long_prompts --streams 64 --rounds 3          three pairs of rounds at 64 streams
    python -m benchmarks.scheduler.long_prompts --servers octavo,vllm            `vllm serve` beside it
    python -m benchmarks.scheduler.long_prompts --smoke                          all of it runs; figures mean nothing

SmolLM2-135M on one replica. Streams of 128 tokens in and 128 out begin at random and follow each other without pause;
prompts of 1,500 tokens with 16 out arrive at random beside them, 0.4 a second. All servers are started first; then each
round goes to one after the other, in turn from the first and from the last, so that a slow minute of the machine meets
all of them. A round makes requests for --seconds, of which the first 6 don't count, and ends when all requests have.

Reports, for the streams, the time between tokens (median, 99th percentile, longest) and the time to the first token
(median); for the long prompts that time as well; the output tokens a second, and all tokens a second: these, and the
prompts that got their first token. At the end, what the target costs: the median over the pairs of rounds of the ratio
of both. Octavo is called by gRPC, vLLM by HTTP. Takes some seconds more than --seconds for each server, round and
number of streams.
"""

import argparse
import asyncio
import contextlib
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.cluster.online import octavo_up
from benchmarks.command import names, numbers, show
from benchmarks.engine.workload import VOCAB_SIZE
from benchmarks.peers import http_client
from benchmarks.peers.engines import OCTAVO, QUANTIZATIONS
from benchmarks.peers.prepare_models import prepare
from benchmarks.peers.server_process import running_server
from benchmarks.peers.servers import servers
from octavo.bench.arrivals import Arrivals
from octavo.bench.backends.grpc_calls import GrpcBackend
from octavo.bench.workload import random_prompts
from octavo.reports import RequestTrace
from tests.support.ports import free_port

VLLM = "vllm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """seconds: how long requests are made. ignored: seconds at the beginning that don't count: the first prompts come
    all at once. begin: seconds in which the streams begin. rate: long prompts a second."""

    seconds: float = 30.0
    ignored: float = 6.0
    begin: float = 2.0
    prompt: int = 128
    output: int = 128
    long_prompt: int = 1500
    long_output: int = 16
    rate: float = 0.4


SMOKE = Load(seconds=1.0, ignored=0.1, begin=0.1, prompt=16, output=4, long_prompt=100, long_output=2, rate=20.0)
WARM_UP = Load(seconds=3.0, ignored=0.1, begin=0.1, rate=1.0)

# Arguments: prompt, seed, number of output tokens.
Complete = Callable[[list[int], int, int], Awaitable[RequestTrace]]
# Runs a function of a server's `Complete` to its end.
Session = Callable[[Callable[[Complete], Awaitable["Traces"]]], "Traces"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """The outcome of a round. since, until: the time that counts, on the clock of the traces."""

    streams: list[RequestTrace]
    long_prompts: list[RequestTrace]
    since: float
    until: float

    def counts(self, time_: float) -> bool:
        return self.since <= time_ < self.until


def octavo_session(target: str) -> Session:
    async def run(work: Callable[[Complete], Awaitable[Traces]]) -> Traces:
        async with GrpcBackend(target) as backend:
            return await work(backend.complete)

    return lambda work: asyncio.run(run(work))


def http_session(port: int, api: http_client.Api) -> Session:
    async def run(work: Callable[[Complete], Awaitable[Traces]]) -> Traces:
        return await work(lambda prompt, seed, output: http_client.complete(port, api, prompt, output))

    return lambda work: asyncio.run(run(work))


async def send(complete: Complete, num_streams: int, load: Load, seed: int) -> Traces:
    """Sends the load of one round; the same for each server with the same seed."""
    random = np.random.default_rng(seed)
    begins = random.uniform(0.0, load.begin, num_streams).tolist()
    arrivals = Arrivals(rate=load.rate).times(int(4 * load.rate * load.seconds) + 9, seed)
    long_prompts = random_prompts(len(arrivals), load.long_prompt, VOCAB_SIZE, seed)
    start = time.perf_counter()

    async def stream(index: int) -> list[RequestTrace]:
        await asyncio.sleep(begins[index])
        traces, own = [], np.random.default_rng((seed, index))
        while time.perf_counter() < start + load.seconds:
            prompt = own.integers(0, VOCAB_SIZE, load.prompt).tolist()
            traces.append(await complete(prompt, seed, load.output))
        return traces

    async def arrive(prompt: list[int], arrival: float) -> RequestTrace:
        await asyncio.sleep(start + arrival - time.perf_counter())
        return await complete(prompt, seed, load.long_output)

    arriving = [
        arrive(prompt, arrival)
        for prompt, arrival in zip(long_prompts, arrivals, strict=True)
        if arrival < load.seconds
    ]
    streams, long_traces = await asyncio.gather(
        asyncio.gather(*map(stream, range(num_streams))), asyncio.gather(*arriving)
    )
    return Traces(
        streams=[trace for each in streams for trace in each],
        long_prompts=long_traces,
        since=start + load.ignored,
        until=start + load.seconds,
    )


def figures(traces: Traces, load: Load) -> dict[str, float]:
    """Raises RuntimeError if a request failed: the others' figures mean nothing."""
    both = traces.streams + traces.long_prompts
    for trace in both:
        if trace.error:
            raise RuntimeError(f"a request failed: {trace.error}")
    gaps_ms = [
        1e3 * gap / count
        for trace in traces.streams
        for gap, at, count in zip(
            np.diff(trace.token_times).tolist(), trace.token_times[1:], trace.token_counts[1:], strict=True
        )
        for _ in range(count)
        if traces.counts(at)
    ]
    num_outputs = sum(
        count
        for trace in both
        for at, count in zip(trace.token_times, trace.token_counts, strict=True)
        if traces.counts(at)
    )
    begun, long_begun = (
        [trace.ttft for trace in each if traces.counts(trace.token_times[0])]
        for each in (traces.streams, traces.long_prompts)
    )
    num_prompts = load.prompt * len(begun) + load.long_prompt * len(long_begun)
    seconds = traces.until - traces.since
    found = {
        "itl_ms_p50": statistics.median(gaps_ms),
        "itl_ms_p99": float(np.percentile(gaps_ms, 99)),
        "itl_ms_max": max(gaps_ms),
        "ttft_s_p50": statistics.median(begun),
        "output_tok_s": num_outputs / seconds,
        "total_tok_s": (num_outputs + num_prompts) / seconds,
        "long_prompts": float(len(long_begun)),
        "long_ttft_s_p50": statistics.median(long_begun) if long_begun else float("nan"),
    }
    return {name: round(value, 3) for name, value in found.items()}


class Run:
    def __init__(self, arguments: argparse.Namespace, log: int) -> None:
        self._arguments, self._log = arguments, log
        self._sessions: dict[str, Session] = {}
        # By server and number of streams: output tokens a second and all tokens a second, of each round.
        self._throughputs: dict[tuple[str, int], list[tuple[float, float]]] = {}

    def start(self, stack: contextlib.ExitStack) -> None:
        """Starts all servers and sends each some requests."""
        arguments = self._arguments
        for name, target in ((f"{OCTAVO} {arguments.target:g} ms", arguments.target), (OCTAVO, 0)):
            if OCTAVO in arguments.servers:
                flag = f"--inter-token-latency-target={target}"
                up = octavo_up(arguments.quantization, arguments.threads, self._log, flag)
                self._sessions[name] = octavo_session(stack.enter_context(up)[1])
        if VLLM in arguments.servers:
            (spec,) = (each for each in servers(arguments.quantization, arguments.threads) if each.server == VLLM)
            port = free_port()
            command, health = [*spec.command, "--port", str(port)], f"http://127.0.0.1:{port}/health"
            stack.enter_context(running_server(command, health, environment=spec.environment, log=self._log))
            self._sessions[spec.name] = http_session(port, spec.api)
        warm_up = SMOKE if arguments.smoke else WARM_UP
        for session in self._sessions.values():
            session(lambda complete: send(complete, 8, warm_up, seed=0))

    def rounds(self) -> None:
        names = list(self._sessions)
        for num_streams in self._arguments.streams:
            load = SMOKE if self._arguments.smoke else Load(seconds=self._arguments.seconds)
            for index in range(self._arguments.rounds):
                for name in names if index % 2 == 0 else reversed(names):
                    self._round(name, num_streams, load, seed=100 * num_streams + 2 * index)
        with_target, *others = names
        for num_streams in self._arguments.streams if OCTAVO in others else ():
            pairs = zip(
                self._throughputs[with_target, num_streams], self._throughputs[OCTAVO, num_streams], strict=True
            )
            ratios = [(output / other_output, total / other) for (output, total), (other_output, other) in pairs]
            output, total = (round(statistics.median(each), 3) for each in zip(*ratios, strict=True))
            self._show({"streams": num_streams, "output_with_over_without": output, "total_with_over_without": total})

    def _round(self, name: str, num_streams: int, load: Load, seed: int) -> None:
        found = figures(self._sessions[name](lambda complete: send(complete, num_streams, load, seed)), load)
        self._throughputs.setdefault((name, num_streams), []).append((found["output_tok_s"], found["total_tok_s"]))
        self._show({"server": name, "streams": num_streams, **found})

    def _show(self, values: dict[str, object]) -> None:
        show({"quantization": self._arguments.quantization, **values}, as_json=self._arguments.json)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=names(OCTAVO, VLLM), default=OCTAVO, help="default: %(default)s")
    parser.add_argument(
        "--streams",
        type=numbers,
        default="64,32,8",
        metavar="N,N,...",
        help="default: %(default)s",
    )
    parser.add_argument("--target", type=float, default=200.0, help="inter_token_latency_target, in milliseconds")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of each server and number of streams")
    parser.add_argument("--seconds", type=float, default=30.0, help="default: %(default)s")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default="none")
    parser.add_argument("--threads", type=int, default=2, help="compute threads of each server")
    parser.add_argument("--smoke", action="store_true", help="short prompts and outputs")
    parser.add_argument("--log", default="/dev/null", help="file for the servers' output")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if VLLM in arguments.servers:
        prepare()
    if VLLM in arguments.servers and arguments.quantization != "none":
        sys.exit(f"--quantization {arguments.quantization}: vLLM is compared without; leave it out of --servers")
    with open(arguments.log, "wb") as log, contextlib.ExitStack() as stack:
        run = Run(arguments, log.fileno())
        run.start(stack)
        run.rounds()


if __name__ == "__main__":
    main()
