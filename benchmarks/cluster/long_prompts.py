"""Measures what long prompts do to the streams beside them, with inter_token_latency_target and without.

    python -m benchmarks.cluster.long_prompts                                  64, 32 and 8 streams, target 200 ms
    python -m benchmarks.cluster.long_prompts --streams 64 --rounds 3          three pairs of rounds at 64 streams
    python -m benchmarks.cluster.long_prompts --servers octavo,vllm            `vllm serve` beside it
    python -m benchmarks.cluster.long_prompts --smoke                          all of it runs; the figures mean nothing

SmolLM2-135M on one replica. Streams of 128 tokens in and 128 out begin at random and follow each other without pause;
prompts of 1,500 tokens with 16 out arrive at random beside them, 0.4 a second, until the streams have ended. All
servers are started first; then each round of requests goes to one after the other, in turn from the first and from the
last, so that a slow minute of the machine meets all of them. Reports, for the streams, the time between tokens (median,
99th percentile, longest) and the time to the first token (median); for the long prompts that time as well; the output
tokens a second of both together until all have ended; and, at the end, what the target costs: the ratio of the medians
of that throughput. Octavo is called by gRPC, vLLM by HTTP. Takes about two minutes for each round of all.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.cluster.online import octavo_up
from benchmarks.engine.workload import VOCAB_SIZE
from benchmarks.peers import http_client
from benchmarks.peers.engines import OCTAVO, QUANTIZATIONS
from benchmarks.peers.prepare_models import prepare
from benchmarks.peers.server_process import running_server
from benchmarks.peers.servers import servers
from octavo.bench.backends.grpc_calls import GrpcBackend
from octavo.bench.workload import arrival_times, random_prompts
from octavo.reports import RequestTrace
from tests.support.ports import free_port

VLLM = "vllm"
# More than arrive while the streams run.
_MOST_LONG_PROMPTS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """turns: requests that a stream makes one after the other. rate: long prompts a second. begin: seconds in which the
    streams begin."""

    turns: int = 3
    prompt: int = 128
    output: int = 128
    long_prompt: int = 1500
    long_output: int = 16
    rate: float = 0.4
    begin: float = 2.0


SMOKE = Load(turns=1, prompt=16, output=4, long_prompt=100, long_output=2, rate=20.0, begin=0.1)
# Few streams end sooner: they make more requests, so that as many long prompts come.
_TURNS_AT = {8: 5, 32: 3, 64: 2}

# Arguments: prompt, seed, number of output tokens.
Complete = Callable[[list[int], int, int], Awaitable[RequestTrace]]
# Runs a function of a server's `Complete` to its end.
Session = Callable[[Callable[[Complete], Awaitable["Traces"]]], "Traces"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    streams: list[RequestTrace]
    long_prompts: list[RequestTrace]


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
    prompts = random_prompts(num_streams * load.turns, load.prompt, VOCAB_SIZE, seed)
    long_prompts = iter(random_prompts(_MOST_LONG_PROMPTS, load.long_prompt, VOCAB_SIZE, seed + 1))
    begins = random.uniform(0.0, load.begin, num_streams).tolist()
    arrivals = arrival_times(_MOST_LONG_PROMPTS, load.rate, seed)
    start, long_calls = time.perf_counter(), []

    async def stream(index: int) -> list[RequestTrace]:
        await asyncio.sleep(begins[index])
        own = prompts[index * load.turns : (index + 1) * load.turns]
        return [await complete(prompt, seed, load.output) for prompt in own]

    async def arrive() -> None:
        for arrival in arrivals:
            await asyncio.sleep(start + arrival - time.perf_counter())
            long_calls.append(asyncio.ensure_future(complete(next(long_prompts), seed, load.long_output)))

    arriving = asyncio.ensure_future(arrive())
    streams = await asyncio.gather(*map(stream, range(num_streams)))
    arriving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await arriving
    return Traces(streams=[trace for each in streams for trace in each], long_prompts=await asyncio.gather(*long_calls))


def figures(traces: Traces) -> dict[str, float]:
    """Raises RuntimeError if a request failed: the others' figures mean nothing."""
    both = traces.streams + traces.long_prompts
    for trace in both:
        if trace.error:
            raise RuntimeError(f"a request failed: {trace.error}")
    gaps_ms = [1e3 * gap for trace in traces.streams for gap in trace.itl]
    duration = max(trace.ended for trace in both) - min(trace.began for trace in both)
    found = {
        "itl_ms_p50": statistics.median(gaps_ms),
        "itl_ms_p99": float(np.percentile(gaps_ms, 99)),
        "itl_ms_max": max(gaps_ms),
        "ttft_s_p50": statistics.median(trace.ttft for trace in traces.streams),
        "output_tok_s": sum(trace.num_tokens for trace in both) / duration,
        "long_prompts": float(len(traces.long_prompts)),
    }
    if traces.long_prompts:
        found["long_ttft_s_p50"] = statistics.median(trace.ttft for trace in traces.long_prompts)
    return {name: round(value, 3) for name, value in found.items()}


class Run:
    def __init__(self, arguments: argparse.Namespace, log: int) -> None:
        self._arguments, self._log = arguments, log
        self._sessions: dict[str, Session] = {}
        # By server and number of streams.
        self._throughputs: dict[tuple[str, int], list[float]] = {}

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
        warm_up = SMOKE if arguments.smoke else Load(turns=1, rate=1.0)
        for session in self._sessions.values():
            session(lambda complete: send(complete, 8, warm_up, seed=0))

    def rounds(self) -> None:
        names = list(self._sessions)
        for num_streams in self._arguments.streams:
            load = SMOKE if self._arguments.smoke else Load(turns=_TURNS_AT.get(num_streams, Load.turns))
            for index in range(self._arguments.rounds):
                for name in names if index % 2 == 0 else reversed(names):
                    self._round(name, num_streams, load, seed=100 * num_streams + 2 * index)
        with_target, *others = names
        for num_streams in self._arguments.streams if OCTAVO in others else ():
            with_, without = (self._throughputs[name, num_streams] for name in (with_target, OCTAVO))
            ratio = statistics.median(with_) / statistics.median(without)
            self._show({"streams": num_streams, "throughput_with_over_without": round(ratio, 3)})

    def _round(self, name: str, num_streams: int, load: Load, seed: int) -> None:
        found = figures(self._sessions[name](lambda complete: send(complete, num_streams, load, seed)))
        self._throughputs.setdefault((name, num_streams), []).append(found["output_tok_s"])
        self._show({"server": name, "streams": num_streams, **found})

    def _show(self, values: dict[str, object]) -> None:
        if self._arguments.json:
            print(json.dumps({"quantization": self._arguments.quantization, **values}), flush=True)
        else:
            print("  ".join(f"{name} {value}" for name, value in values.items()), flush=True)


def _servers(text: str) -> list[str]:
    wanted = text.split(",")
    if unknown := set(wanted) - {OCTAVO, VLLM}:
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: must be among {OCTAVO}, {VLLM}")
    return wanted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=_servers, default=OCTAVO, help="default: %(default)s")
    parser.add_argument(
        "--streams", type=lambda text: [int(each) for each in text.split(",")], default="64,32,8", metavar="N,N,...",
        help="default: %(default)s",
    )  # fmt: skip
    parser.add_argument("--target", type=float, default=200.0, help="inter_token_latency_target, in milliseconds")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of each server and number of streams")
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
