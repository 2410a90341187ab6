"""Engines with and without speculation in one process, and turns of requests on them."""

import gc
import itertools
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.speculation.workloads import Workload
from configs.load import load_options
from configs.sampling import PARAMETERS
from octavo.local.engine import Engine, build_engine
from protos import inference_pb2 as pb

_MAX_NUM_SEQS = 64
# GB: 64 requests of 600 tokens.
_KV_CACHE_MEMORY = 1.0
# Seconds for which an engine computes before the next one goes on.
_SLICE = 0.1


@dataclass(frozen=True, slots=True)
class Method:
    name: str
    # The speculative_config.
    config: dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Turn:
    """Requests that one engine has computed. All but the outputs is of the steps in which no stream was idle: how long
    the last few requests take says little of a server that always has more. Times are in seconds."""

    # By place in the turn.
    outputs: list[list[int]] = field(default_factory=list)
    duration: float = 0.0
    num_steps: int = 0
    num_tokens: int = 0
    # The core with its drafters, and the encoding of plans and results.
    scheduling: float = 0.0
    # All of the steps.
    computing: float = 0.0
    num_draft_tokens: int = 0
    num_accepted: int = 0

    @property
    def rate(self) -> float:
        return self.num_tokens / self.duration


class Workbench:
    """One engine without speculation, "off", and one for each method."""

    def __init__(self, methods: Sequence[Method], *, model: dict[str, Any], threads: int, temperature: float) -> None:
        """model: options of the model that all serve."""
        self._temperature = temperature
        self._engines: dict[str, Engine] = {}
        for method in (Method("off", {}), *methods):
            flags: dict[str, Any] = {
                **model,
                "dtype": "bfloat16",
                "worker_threads": threads,
                "max_num_seqs": _MAX_NUM_SEQS,
                "kv_cache_memory": _KV_CACHE_MEMORY,
                "enable_prefix_caching": False,
            }
            if method.config:
                flags["speculative_config"] = method.config
            self._engines[method.name] = build_engine(load_options(flags=flags))
        self._groups = itertools.count(1)
        # By engine and number of tokens: the seconds of steps without prefills.
        self.step_times: dict[str, dict[int, list[float]]] = {name: defaultdict(list) for name in self._engines}

    def turn(
        self,
        name: str,
        workload: Workload,
        prompts: Sequence[Sequence[int]],
        chosen: Sequence[int],
        streams: int,
    ) -> Turn:
        """Computes the prompts of these indices, `streams` of them at once: the next begins when one ends."""
        return self.turns([name], workload, prompts, chosen, streams)[name]

    def turns(
        self,
        names: Sequence[str],
        workload: Workload,
        prompts: Sequence[Sequence[int]],
        chosen: Sequence[int],
        streams: int,
    ) -> dict[str, Turn]:
        """`turn` of several engines, which go on one after the other, a tenth of a second each: a machine that others
        use, too, may be three times as fast in one second as in the next, and so all engines meet all of its states."""
        gc.collect()
        found = {name: Turn() for name in names}
        running = {name: self._steps(name, found[name], workload, prompts, chosen, streams) for name in names}
        while running:
            for name, steps in list(running.items()):
                end = time.perf_counter() + _SLICE
                while time.perf_counter() < end:
                    if not next(steps, False):
                        del running[name]
                        break
        return found

    def _steps(
        self,
        name: str,
        turn: Turn,
        workload: Workload,
        prompts: Sequence[Sequence[int]],
        chosen: Sequence[int],
        streams: int,
    ) -> Iterator[bool]:
        """Yields True after each step."""
        engine, times = self._engines[name], self._engines[name].times
        turn.outputs = [[] for _ in chosen]
        waiting, running = deque(range(len(chosen))), dict[int, int]()
        while waiting or running:
            start, scheduling, computing = time.perf_counter(), times.scheduling, times.total
            drafts, accepted = engine.num_draft_tokens
            while waiting and len(running) < streams:
                running[group := next(self._groups)] = place = waiting.popleft()
                engine.submit(group, prompts[chosen[place]], self._sampling(workload, chosen[place]))
            are_busy = len(running) == streams
            step = engine.step()
            # None only while images are prepared, and there are none.
            assert step.plan is not None
            if not step.plan.chunks:
                self.step_times[name][step.plan.num_tokens].append(times.total - computing)
            for sequence in step.sequences:
                turn.outputs[running[sequence.key[0]]] += sequence.token_ids
                if sequence.end is not None:
                    assert not sequence.end.message, sequence.end.message
                    del running[sequence.key[0]]
            if are_busy:
                turn.num_steps += 1
                turn.num_tokens += sum(len(sequence.token_ids) for sequence in step.sequences)
                turn.scheduling += times.scheduling - scheduling
                turn.computing += times.total - computing
                turn.num_draft_tokens += engine.num_draft_tokens[0] - drafts
                turn.num_accepted += engine.num_draft_tokens[1] - accepted
                turn.duration += time.perf_counter() - start
            yield True

    def _sampling(self, workload: Workload, index: int) -> pb.SamplingParams:
        defaults: dict[str, Any] = {parameter.name: parameter.default for parameter in PARAMETERS}
        defaults["temperature"] = self._temperature
        return pb.SamplingParams(
            **defaults,
            seed=index,
            n=1,
            ignore_eos=workload.ignore_eos,
            max_tokens=workload.max_tokens,
            min_tokens=workload.max_tokens if workload.ignore_eos else 0,
        )
