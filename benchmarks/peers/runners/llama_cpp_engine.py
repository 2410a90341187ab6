"""Runs llama.cpp as built by install_llama_cpp.sh, with any Python (see engine_protocol.py).

    python llama_cpp_engine.py PROGRAMS_DIRECTORY MODEL.gguf '{"threads": 2, "batch": 2048, "ubatch": 512, "flags": []}'

Requests that share nothing are measured by llama-batched-bench, a process each, which times itself. It draws random
prompts, and feeds back random tokens where a server would choose the likeliest, so this choice costs it nothing. It
cannot be given prompts with a common prefix, so those go to llama-server, with a slot for each.
"""

import json
import math
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from engine_protocol import Outcome, Work, serve

from benchmarks.peers.server_process import running_server
from tests.support.ports import free_port

# The KV cache of a sequence is a multiple of so many tokens.
CELLS = 256


class LlamaCpp:
    def __init__(self, programs: Path, model: str, settings: Mapping[str, Any]) -> None:
        self._programs, self._model = programs, model
        threads, batch, ubatch = (str(settings[name]) for name in ("threads", "batch", "ubatch"))
        self._flags = ["-t", threads, "-tb", threads, "-b", batch, "-ub", ubatch, *settings["flags"]]

    def run(self, work: Work) -> Outcome:
        return self._through_server(work) if work.shared else self._batched_bench(work)

    def _command(self, program: str, work: Work) -> list[str]:
        cells = math.ceil((len(work.prompts[0]) + work.output) / CELLS) * CELLS
        context = str(cells * len(work.prompts))
        return [str(self._programs / program), "-m", self._model, *self._flags, "-c", context]

    def _batched_bench(self, work: Work) -> Outcome:
        command = [
            *self._command("llama-batched-bench", work),
            *("-npp", str(len(work.prompts[0])), "-ntg", str(work.output), "-npl", str(len(work.prompts))),
            *("--output-format", "jsonl"),
        ]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        figures = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
        parts = {"prompt_seconds": figures["t_pp"], "decode_seconds": figures["t_tg"]}
        return Outcome(figures["pl"] * figures["tg"], figures["t"], parts)

    def _through_server(self, work: Work) -> Outcome:
        port = free_port()
        command = [*self._command("llama-server", work), "-np", str(len(work.prompts)), "--port", str(port)]
        address = f"http://127.0.0.1:{port}"

        def complete(prompt: list[int]) -> int:
            body = {
                "prompt": prompt,
                "n_predict": work.output,
                "ignore_eos": True,
                "temperature": 0.0,
                "cache_prompt": True,
            }
            request = urllib.request.Request(
                f"{address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request) as response:
                return json.load(response)["tokens_predicted"]

        with running_server(command, f"{address}/health"), ThreadPoolExecutor(len(work.prompts)) as threads:
            start = time.perf_counter()
            tokens = sum(threads.map(complete, work.prompts))
            seconds = time.perf_counter() - start
        return Outcome(tokens, seconds, {"by": "llama-server"})


def load() -> tuple[Mapping[str, Any], Callable[[Work], Outcome]]:
    settings = json.loads(sys.argv[3])
    return settings, LlamaCpp(Path(sys.argv[1]), sys.argv[2], settings).run


if __name__ == "__main__":
    serve(load)
