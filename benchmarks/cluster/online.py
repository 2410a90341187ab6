"""Compares Octavo's local cluster with the peers' servers, as clients see them, one server after the other.

    python -m benchmarks.cluster.online                                    Octavo, `vllm serve` and llama-server
    python -m benchmarks.cluster.online --servers octavo,vllm --rounds 3   some of them; medians of 3 rounds
    python -m benchmarks.cluster.online --quantization int8 --json         other precision; a line of JSON a figure
    python -m benchmarks.cluster.online --smoke                            all of them run; the figures mean nothing

SmolLM2-135M, random prompts of 128 tokens, 128 out, greedy, streamed. The request rate is infinite, but at most 64,
then 8, then 1 requests run at once. Router, scheduler, worker and client share the cores, as do a peer's processes and
the same client. Octavo is called by gRPC, the others by HTTP. Reports output tokens/s, the time to the first token
(median), the time between tokens (median and 99th percentile), and the peak PSS of all processes of a server together,
for Octavo with `octavo up` itself. Octavo runs first and last. A server that is not installed is named and left out.
Takes about 8 minutes, of which vLLM needs 2 to start.
"""

import argparse
import asyncio
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.cluster.up import started
from benchmarks.command import names, show
from benchmarks.engine.workload import VOCAB_SIZE
from benchmarks.peers import http_client
from benchmarks.peers.engine_process import MemoryPeak
from benchmarks.peers.engines import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, OCTAVO, QUANTIZATIONS
from benchmarks.peers.prepare_models import prepare
from benchmarks.peers.server_process import running_server
from benchmarks.peers.servers import SERVERS, ServerSpec, servers
from octavo.bench.backends.grpc_calls import GrpcBackend
from octavo.bench.serve import Load, measure
from octavo.bench.workload import random_prompts
from octavo.cluster.serving import wait_until_serving
from octavo.reports import RequestTrace
from tests.support.ports import free_port

# Concurrency -> requests for each concurrent one: enough that the start and the end of a run weigh little.
TURNS = {64: 2, 8: 3, 1: 4}
READY_TIMEOUT = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    prompt: int = 128
    output: int = 128


SMOKE_LENGTHS = Lengths(prompt=16, output=4)


@dataclass(frozen=True, slots=True)
class Server:
    """A running server. send(concurrency, number of requests, seed of their prompts)."""

    pid: int
    send: Callable[[int, int, int], list[RequestTrace]]


@contextlib.contextmanager
def octavo_up(quantization: str, threads: int, log: int, *flags: str) -> Iterator[tuple[int, str]]:
    """Runs `octavo up` with one replica. Yields its process id and the router's address."""
    target = f"localhost:{free_port()}"
    with started(
        *(f"--port={target.partition(':')[2]}", f"--worker-threads={threads}", f"--quantization={quantization}"),
        *(f"--max-num-seqs={MAX_NUM_SEQS}", f"--max-num-batched-tokens={MAX_NUM_BATCHED_TOKENS}", *flags),
        output=log,
    ) as up:
        asyncio.run(asyncio.wait_for(wait_until_serving(target), READY_TIMEOUT))
        yield up.pid, target


@contextlib.contextmanager
def octavo_cluster(quantization: str, threads: int, lengths: Lengths, log: int) -> Iterator[Server]:
    with octavo_up(quantization, threads, log) as (pid, target):
        yield Server(pid, _sender(target, lengths))


def _sender(target: str, lengths: Lengths) -> Callable[[int, int, int], list[RequestTrace]]:
    def send(concurrency: int, number: int, seed: int) -> list[RequestTrace]:
        load = Load(
            num_requests=number,
            rate=float("inf"),
            concurrency=concurrency,
            prompt_len=lengths.prompt,
            output_len=lengths.output,
            seed=seed,
        )
        return list(asyncio.run(measure(load, GrpcBackend(target), lambda trace: None)).traces)

    return send


@contextlib.contextmanager
def peer_server(spec: ServerSpec, lengths: Lengths, log: int) -> Iterator[Server]:
    port = free_port()

    def send(concurrency: int, number: int, seed: int) -> list[RequestTrace]:
        prompts = random_prompts(number, lengths.prompt, VOCAB_SIZE, seed)
        return asyncio.run(http_client.measure(port, spec.api, prompts, lengths.output, concurrency))

    command = [*spec.command, "--port", str(port)]
    health = f"http://127.0.0.1:{port}/health"
    with running_server(command, health, environment=spec.environment, log=log) as process:
        yield Server(process.pid, send)


class Run:
    def __init__(self, arguments: argparse.Namespace, log: int) -> None:
        self._arguments, self._log = arguments, log
        self._lengths = SMOKE_LENGTHS if arguments.smoke else Lengths()
        self._seed = 0

    def all_servers(self) -> None:
        wanted = self._arguments.servers
        if OCTAVO in wanted:
            self._octavo()
        for spec in servers(self._arguments.quantization, self._arguments.threads):
            if spec.server not in wanted:
                continue
            if not spec.program.exists():
                print(f"{spec.name} is left out: it is not installed; run {spec.installed_by}", file=sys.stderr)
                continue
            with self._timed(spec.name, peer_server(spec, self._lengths, self._log)) as server:
                self._measure(spec.name, server)
        if OCTAVO in wanted and len(wanted) > 1:
            self._octavo()

    def _octavo(self) -> None:
        quantization, threads = self._arguments.quantization, self._arguments.threads
        with self._timed(OCTAVO, octavo_cluster(quantization, threads, self._lengths, self._log)) as server:
            self._measure(OCTAVO, server)

    @contextlib.contextmanager
    def _timed(self, name: str, starting: contextlib.AbstractContextManager[Server]) -> Iterator[Server]:
        start = time.monotonic()
        with starting as server, MemoryPeak(server.pid) as memory:
            start_seconds = time.monotonic() - start
            yield server
        self._show({"server": name, "start_s": round(start_seconds, 1), "peak_mib": memory.mib})

    def _measure(self, name: str, server: Server) -> None:
        self._send(server, 8, 8)
        for concurrency, turns in TURNS.items():
            rounds = [self._send(server, concurrency, concurrency * turns) for _ in range(self._arguments.rounds)]
            medians = {key: round(statistics.median(each[key] for each in rounds), 2) for key in rounds[0]}
            self._show({"server": name, "concurrency": concurrency, **medians})

    def _send(self, server: Server, concurrency: int, number: int) -> dict[str, float]:
        """Returns the figures of one round. Raises RuntimeError if a request failed: the others' rate means nothing."""
        self._seed += 1
        traces = server.send(concurrency, number, self._seed)
        for trace in traces:
            if trace.error:
                raise RuntimeError(f"a request failed: {trace.error}")
        duration = max(trace.ended for trace in traces) - min(trace.began for trace in traces)
        gaps_ms = [1e3 * gap for trace in traces for gap in trace.itl]
        return {
            "output_tok_s": sum(trace.num_tokens for trace in traces) / duration,
            "ttft_s_p50": statistics.median(trace.ttft for trace in traces),
            "itl_ms_p50": statistics.median(gaps_ms),
            "itl_ms_p99": float(np.percentile(gaps_ms, 99)),
        }

    def _show(self, values: dict[str, object]) -> None:
        show({"quantization": self._arguments.quantization, **values}, as_json=self._arguments.json)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    everything = ",".join((OCTAVO, *SERVERS))
    parser.add_argument("--servers", type=names(OCTAVO, *SERVERS), default=everything, help="default: %(default)s")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default="none")
    parser.add_argument("--threads", type=int, default=2, help="compute threads of each server")
    parser.add_argument("--rounds", type=int, default=1, help="rounds per median")
    parser.add_argument("--smoke", action="store_true", help="short prompts and outputs")
    parser.add_argument("--log", default="/dev/null", help="file for the servers' output")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.servers != [OCTAVO]:
        prepare()
    with open(arguments.log, "wb") as log:
        Run(arguments, log.fileno()).all_servers()


if __name__ == "__main__":
    main()
