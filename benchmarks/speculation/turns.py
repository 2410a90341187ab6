"""Engines with and without speculation in one process, and turns of requests on them."""

import gc
import itertools
import time
from collections import defaultdict, deque
from collections.abc import Sequence
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


@dataclass(frozen=True, slots=True)
class Method:
    name: str
    # The speculative_config.
    config: dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Turn:
    """Requests that one engine has computed. Times are in seconds, over all steps."""

    outputs: dict[int, list[int]] = field(default_factory=dict)
    duration: float = 0.0
    num_steps: int = 0
    # The core with its drafters, and the encoding of plans and results.
    scheduling: float = 0.0
    # All of the steps.
    computing: float = 0.0
    num_draft_tokens: int = 0
    num_accepted: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.outputs.values()))

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
        engine, turn = self._engines[name], Turn()
        waiting, running = deque(chosen), dict[int, int]()
        stats = engine._core.stats
        drafts, accepted = stats.num_draft_tokens, stats.num_accepted_tokens
        times = engine.times
        num_steps, scheduling, total = times.num_steps, times.scheduling, times.total
        gc.collect()
        start = time.perf_counter()
        while waiting or running:
            while waiting and len(running) < streams:
                running[group := next(self._groups)] = index = waiting.popleft()
                turn.outputs[index] = []
                engine.submit(group, prompts[index], self._sampling(workload, index))
            before = engine.times.total
            step = engine.step()
            # None only while images are prepared, and there are none.
            assert step.plan is not None
            if len(step.plan.chunks) == len(step.plan.drafts):
                self.step_times[name][step.plan.num_tokens].append(engine.times.total - before)
            for sequence in step.sequences:
                turn.outputs[running[sequence.key[0]]] += sequence.token_ids
                if sequence.end is not None:
                    assert not sequence.end.message, sequence.end.message
                    del running[sequence.key[0]]
        turn.duration = time.perf_counter() - start
        turn.num_steps = times.num_steps - num_steps
        turn.scheduling, turn.computing = times.scheduling - scheduling, times.total - total
        stats = engine._core.stats
        turn.num_draft_tokens = stats.num_draft_tokens - drafts
        turn.num_accepted = stats.num_accepted_tokens - accepted
        return turn

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
