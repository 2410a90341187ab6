"""Compares what speculation gains in Octavo, in vLLM's CPU build and in llama-server, over HTTP, in one run.

    python -m benchmarks.speculation.peers                                    all that are installed
    python -m benchmarks.speculation.peers --servers octavo,vllm:ngram --streams 1 --rounds 1
    --json: a line of JSON for each figure. --temperature 1: drawn tokens instead of the likeliest.

The requests are those of workloads.py, sent as token ids by the same client from the same cores. Each server runs
twice, with the method and without, and the two take turns; a ratio is that of two turns of one round. Outputs end as
the model says. A server that is not installed is named and left out. If one with its method ends or answers with an
error, the end of its log is printed. About 20 minutes.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.cluster.up import started
from benchmarks.peers import http_client
from benchmarks.peers.http_client import Api
from benchmarks.peers.prepare_models import model_path, prepare
from benchmarks.peers.server_process import running_server
from benchmarks.peers.servers import ServerSpec, servers
from benchmarks.speculation.workloads import Workload, workloads
from octavo.cluster.serving import wait_until_serving
from tests.support.ports import free_port

_MOST_STREAMS = 8
_READY_S = 120.0
# Tokens of a prompt and its output.
_SLOT = 1024
_NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
# By server and method: the flags that turn it on.
METHODS: dict[str, tuple[str, ...]] = {
    "octavo:auto": ("--speculative-config", json.dumps({"method": "auto"})),
    "vllm:ngram": ("--speculative-config", json.dumps(_NGRAM)),
    "vllm:suffix": ("--speculative-config", json.dumps({"method": "suffix", "num_speculative_tokens": 8})),
    "llama-server:ngram-simple": ("--spec-type", "ngram-simple"),
    "llama-server:ngram-mod": ("--spec-type", "ngram-mod"),
    "llama-server:draft": ("--spec-type", "draft-simple", "-md", str(model_path("Q4_0"))),
}
_LAST_LINES = 12


class FailedError(Exception):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    port: int
    api: Api


class Run:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._workloads = [workloads()[name] for name in arguments.workloads]

    def compare(self, name: str) -> None:
        server, _, method = name.partition(":")
        spec = _spec(server, self._arguments.threads)
        if spec is not None and not spec.program.exists():
            print(f"{server} is left out: it is not installed; run {spec.installed_by}", file=sys.stderr)
            return
        with tempfile.TemporaryDirectory() as directory:
            log = Path(directory) / "log"
            try:
                with (
                    self._started(server, spec, (), Path(directory) / "off") as off,
                    self._started(server, spec, METHODS[name], log) as on,
                ):
                    self._measure(server, method, off, on)
            except (FailedError, RuntimeError) as error:
                lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
                self._show({"server": server, "method": method, "failed": str(error), "log": lines[-_LAST_LINES:]})

    @contextlib.contextmanager
    def _started(self, server: str, spec: ServerSpec | None, flags: Sequence[str], log: Path) -> Iterator[Server]:
        port, threads = free_port(), self._arguments.threads
        with log.open("wb") as output:
            if spec is None:
                http_port = free_port()
                own = (f"--port={port}", f"--http-port={http_port}", f"--worker-threads={threads}")
                with started(*own, f"--max-num-seqs={_MOST_STREAMS}", *flags, output=output.fileno()):
                    asyncio.run(asyncio.wait_for(wait_until_serving(f"localhost:{port}"), _READY_S))
                    like_vllm = _spec("vllm", threads)
                    assert like_vllm is not None
                    yield Server(port=http_port, api=self._api(like_vllm, without={"model"}))
                return
            sizes = ("-np", str(_MOST_STREAMS), "-c", str(_MOST_STREAMS * _SLOT)) if server == "llama-server" else ()
            with running_server(
                [*spec.command, *sizes, *flags, "--port", str(port)],
                f"http://127.0.0.1:{port}/health",
                environment=spec.environment,
                log=output.fileno(),
            ):
                yield Server(port=port, api=self._api(spec))

    def _api(self, spec: ServerSpec, without: frozenset[str] | set[str] = frozenset()) -> Api:
        def body(prompt: Sequence[int], output: int) -> Mapping[str, Any]:
            given = {**spec.api.body(prompt, output), "temperature": self._arguments.temperature, "seed": 1}
            return {name: value for name, value in given.items() if name not in {"ignore_eos", *without}}

        return replace(spec.api, body=body)

    def _measure(self, server: str, method: str, off: Server, on: Server) -> None:
        for workload in self._workloads:
            prompts = workload.prompts()
            for each in (off, on):
                _rate(each, workload, prompts[-4:], 4)
            for streams in self._arguments.streams:
                count = max(4, streams)
                ratios, rates = [], []
                for number in range(self._arguments.rounds):
                    chosen = [prompts[(number * count + i) % len(prompts)] for i in range(count)]
                    turns = {
                        id(each): _rate(each, workload, chosen, streams)
                        for each in ((off, on) if number % 2 == 0 else (on, off))
                    }
                    rates.append(turns[id(on)])
                    ratios.append(turns[id(on)] / turns[id(off)])
                self._show(
                    {
                        "server": server,
                        "method": method,
                        "workload": workload.name,
                        "streams": streams,
                        "tok_s": round(statistics.median(rates), 1),
                        "ratio": round(statistics.median(ratios), 3),
                        "ratios": [round(each, 3) for each in ratios],
                    }
                )

    def _show(self, values: dict[str, object]) -> None:
        if self._arguments.json:
            print(json.dumps({"temperature": self._arguments.temperature, **values}), flush=True)
        else:
            print("  ".join(f"{name} {value}" for name, value in values.items()), flush=True)


def _spec(server: str, threads: int) -> ServerSpec | None:
    """None: Octavo."""
    return next((each for each in servers("none", threads) if each.server == server), None)


def _rate(server: Server, workload: Workload, prompts: Sequence[Sequence[int]], streams: int) -> float:
    """Output tokens a second of requests, `streams` at once. Raises FailedError."""
    call = http_client.measure(
        server.port, server.api, prompts, workload.max_tokens, streams, may_end_early=not workload.ignore_eos
    )
    traces = asyncio.run(call)
    for trace in traces:
        if trace.error:
            raise FailedError(trace.error)
    duration = max(trace.ended for trace in traces) - min(trace.began for trace in traces)
    return sum(trace.num_tokens for trace in traces) / duration


def _among(known: Sequence[str], text: str) -> list[str]:
    names = [each for each in text.split(",") if each]
    if unknown := set(names) - set(known):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: must be among {', '.join(known)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=lambda text: _among([*METHODS], text), default=[*METHODS])
    parser.add_argument(
        "--workloads", type=lambda text: _among(["edit", "quote", "chat"], text), default=["edit", "quote", "chat"]
    )
    parser.add_argument(
        "--streams", type=lambda text: [int(each) for each in text.split(",")], default=[1, _MOST_STREAMS]
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=2, help="compute threads of each server")
    parser.add_argument("--rounds", type=int, default=3, help="rounds per median")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if max(arguments.streams) > _MOST_STREAMS:
        parser.error(f"--streams: at most {_MOST_STREAMS}")
    prepare()
    run = Run(arguments)
    for name in arguments.servers:
        run.compare(name)


if __name__ == "__main__":
    main()
