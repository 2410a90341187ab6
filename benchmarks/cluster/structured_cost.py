"""Compares streams held to a JSON schema with free ones, in a local cluster and in the peers' servers.

    python -m benchmarks.cluster.structured_cost                               Octavo, `vllm serve` and llama-server
    python -m benchmarks.cluster.structured_cost --servers octavo --rounds 5   one of them; medians of 5 rounds
    python -m benchmarks.cluster.structured_cost --smoke                       all of them run; the figures mean nothing
    --json: a line of JSON for each figure. --temperature 1: drawn tokens instead of the likeliest.

SmolLM2-135M, random prompts of 16 tokens, 96 tokens out, streamed over HTTP, by the same client from the same cores. In
each turn 64, 32, 8 and 1 requests begin together, all of one kind: `free` has no constraint, `records` a schema with
short keys and strings, `long_keys` one with long keys, most of whose tokens are forced. Their outputs are lists too
long to end, so that each kind has the same number of tokens. A round has a turn of each kind, one after the other; a
ratio is that of a kind to `free` in the same round. Reports output tokens/s and ratios of each round, and medians. A
server that is not installed is named and left out. Takes about 10 minutes.
"""

import argparse
import asyncio
import contextlib
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.cluster.up import started
from benchmarks.command import names, numbers, show
from benchmarks.engine.workload import VOCAB_SIZE
from benchmarks.grammar.schemas import SCHEMAS
from benchmarks.peers import http_client
from benchmarks.peers.engines import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, OCTAVO
from benchmarks.peers.http_client import Api
from benchmarks.peers.prepare_models import prepare
from benchmarks.peers.server_process import running_server
from benchmarks.peers.servers import SERVERS, servers
from octavo.bench.workload import random_prompts
from octavo.cluster.serving import wait_until_serving
from tests.support.ports import free_port

FREE = "free"
_CONCURRENCIES = (64, 32, 8, 1)
_READY_S = 120.0
KINDS = (FREE, *SCHEMAS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    prompt: int = 16
    output: int = 96


_SMOKE_SIZES = Sizes(output=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running server. apis: by kind of request."""

    name: str
    port: int
    apis: Mapping[str, Api]


@contextlib.contextmanager
def octavo_cluster(threads: int, like_vllm: Api, log: int) -> Iterator[Server]:
    """Runs `octavo up` with one replica. like_vllm: how vLLM is asked for tokens; Octavo takes the same."""
    port, http_port = free_port(), free_port()
    with started(
        *(f"--port={port}", f"--http-port={http_port}", f"--worker-threads={threads}"),
        *(f"--max-num-seqs={MAX_NUM_SEQS}", f"--max-num-batched-tokens={MAX_NUM_BATCHED_TOKENS}"),
        output=log,
    ):
        asyncio.run(asyncio.wait_for(wait_until_serving(f"localhost:{port}"), _READY_S))
        yield Server(name=OCTAVO, port=http_port, apis=_completions(_without(like_vllm, "model")))


@contextlib.contextmanager
def _peer(name: str, threads: int, temperature: float, log: int) -> Iterator[Server | None]:
    spec = next(each for each in servers("none", threads) if each.server == name)
    if not spec.program.exists():
        print(f"{spec.name} is left out: it is not installed; run {spec.installed_by}", file=sys.stderr)
        yield None
        return
    api = _with(spec.api, {"temperature": temperature})
    port = free_port()
    with running_server(
        [*spec.command, "--port", str(port)],
        f"http://127.0.0.1:{port}/health",
        environment=spec.environment,
        log=log,
    ):
        yield Server(name=spec.name, port=port, apis=_completions(api) if name == "vllm" else _llama(api))


def _completions(api: Api) -> dict[str, Api]:
    """OpenAI's completions, with vLLM's field for a schema."""
    held = _without(api, "ignore_eos")
    return {FREE: api} | {
        kind: _with(held, {"structured_outputs": {"json": schema}}) for kind, schema in SCHEMAS.items()
    }


def _llama(api: Api) -> dict[str, Api]:
    held = _without(api, "ignore_eos")
    return {FREE: api} | {kind: _with(held, {"json_schema": schema}) for kind, schema in SCHEMAS.items()}


def _with(api: Api, more: Mapping[str, Any]) -> Api:
    def body(prompt: Sequence[int], output: int) -> dict[str, Any]:
        return {**api.body(prompt, output), **more}

    return replace(api, body=body)


def _without(api: Api, field: str) -> Api:
    def body(prompt: Sequence[int], output: int) -> dict[str, Any]:
        return {name: value for name, value in api.body(prompt, output).items() if name != field}

    return replace(api, body=body)


class Run:
    def __init__(self, arguments: argparse.Namespace, log: int) -> None:
        self._arguments, self._log = arguments, log
        self._sizes = _SMOKE_SIZES if arguments.smoke else Sizes()
        self._seed = 0

    def all_servers(self) -> None:
        threads, temperature = self._arguments.threads, self._arguments.temperature
        for name in self._arguments.servers:
            if name == OCTAVO:
                like_vllm = next(each.api for each in servers("none", threads) if each.server == "vllm")
                api = _with(like_vllm, {"temperature": temperature})
                with octavo_cluster(threads, api, self._log) as server:
                    self._measure(server)
                continue
            with _peer(name, threads, temperature, self._log) as peer:
                if peer is not None:
                    self._measure(peer)

    def _measure(self, server: Server) -> None:
        for kind in KINDS:
            # Compiles the schema, and wakes what sleeps until the first request.
            self._rate(server, kind, 8)
        num_rounds = self._arguments.rounds if server.name == OCTAVO else self._arguments.peer_rounds
        for concurrency in self._arguments.concurrency:
            rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for number in range(num_rounds):
                # Neither kind is always first.
                for kind in KINDS if number % 2 == 0 else KINDS[::-1]:
                    rates[kind].append(self._rate(server, kind, concurrency))
            for kind, found in rates.items():
                ratios = [own / free for own, free in zip(found, rates[FREE], strict=True)]
                self._show(
                    {
                        "server": server.name,
                        "streams": concurrency,
                        "kind": kind,
                        "output_tok_s": round(statistics.median(found), 1),
                        "rates": [round(each, 1) for each in found],
                        "ratio": round(statistics.median(ratios), 3),
                        "ratios": [round(each, 3) for each in ratios],
                    }
                )

    def _rate(self, server: Server, kind: str, concurrency: int) -> float:
        """Returns output tokens/s of one turn. Raises RuntimeError if a request failed: the others' rate means
        nothing."""
        self._seed += 1
        prompts = random_prompts(concurrency, self._sizes.prompt, VOCAB_SIZE, self._seed)
        # A stream alone is short: several, one after the other.
        if concurrency == 1:
            prompts = random_prompts(4, self._sizes.prompt, VOCAB_SIZE, self._seed)
        call = http_client.measure(server.port, server.apis[kind], prompts, self._sizes.output, concurrency)
        traces = asyncio.run(call)
        for trace in traces:
            if trace.error:
                raise RuntimeError(f"{server.name}: a request of kind {kind} failed: {trace.error}")
        duration = max(trace.ended for trace in traces) - min(trace.began for trace in traces)
        return sum(trace.num_tokens for trace in traces) / duration

    def _show(self, values: dict[str, object]) -> None:
        show({"temperature": self._arguments.temperature, **values}, as_json=self._arguments.json)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    everything = ",".join((OCTAVO, *SERVERS))
    parser.add_argument("--servers", type=names(OCTAVO, *SERVERS), default=everything, help="default: %(default)s")
    parser.add_argument("--concurrency", type=numbers, default=list(_CONCURRENCIES))
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=2, help="compute threads of each server")
    parser.add_argument("--rounds", type=int, default=3, help="rounds per median")
    parser.add_argument("--peer-rounds", type=int, default=1, help="rounds of each peer")
    parser.add_argument("--smoke", action="store_true", help="short outputs")
    parser.add_argument("--log", default="/dev/null", help="file for the servers' output")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.servers != [OCTAVO]:
        prepare()
    with open(arguments.log, "wb") as log:
        Run(arguments, log.fileno()).all_servers()


if __name__ == "__main__":
    main()
