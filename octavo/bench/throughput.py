"""Measures the engine alone: scheduler core and worker in one process."""

import itertools
import time
from collections.abc import Callable
from dataclasses import asdict, astuple

import numpy as np

from configs.options import Options
from configs.sampling import PARAMETERS
from octavo.bench.profile import StepProfile, op_times
from octavo.bench.workload import random_prompts
from octavo.client.errors import InvalidRequest
from octavo.local.engine import Engine, StepTimes, build_engine
from octavo.plan.costs.samples import EngineSettings, StepRecorder
from octavo.reports import Report, RequestTrace
from protos import inference_pb2 as pb

# Enough to run every shape of a step once.
_WARM_UP_TOKENS = 4
# A profiled step makes thousands of events, so few steps are enough.
_PROFILED_TOKENS = 32


class Bench:
    """One loaded engine, measured at several concurrencies."""

    def __init__(self, options: Options, *, prompt_len: int, output_len: int, seed: int) -> None:
        """Loads the model. Raises what octavo.local.engine.build_engine raises, and InvalidRequest for lengths that
        exceed max_model_len."""
        self._engine: Engine = build_engine(options)
        self._prompt_len, self._output_len = prompt_len, output_len
        self._groups = itertools.count(1)
        self._seeds = itertools.count(seed)
        model = self._engine.model
        self._max_num_seqs = options.max_num_seqs
        self._speculates = options.speculative_config is not None
        self._settings = EngineSettings(
            block_size=model.block_size,
            num_blocks=model.num_blocks,
            max_model_len=model.max_model_len,
            kv_cache_memory=0.0 if options.num_blocks_override else options.kv_cache_memory,
        )
        if prompt_len + output_len > model.max_model_len:
            raise InvalidRequest(
                f"prompt_len={prompt_len} and output_len={output_len} exceed max_model_len={model.max_model_len}"
            )

    def measure(
        self, concurrency: int, *, profile: bool, on_tokens: Callable[[int], None], warms_up: bool = True
    ) -> Report:
        """Runs `concurrency` requests that start together. on_tokens: called with the number of output tokens of each
        step. warms_up: False if a run before it has done so."""
        if warms_up:
            self._run(concurrency, min(_WARM_UP_TOKENS, self._output_len), lambda count: None)
        before = _copy(self._engine.times)
        start = time.perf_counter()
        # With drafts, a plan does not say how many tokens its step samples.
        steps = None if self._speculates else StepRecorder(self._max_num_seqs)
        num_drafts, num_accepted = self._engine.num_draft_tokens
        traces = self._run(concurrency, self._output_len, on_tokens, steps)
        duration = time.perf_counter() - start
        extra = _time_split(before, self._engine.times)
        if steps is not None:
            # `octavo plan --fit` makes a cost model from these.
            extra |= {"engine_settings": asdict(self._settings), "steps": steps.as_json()}
        else:
            drafts, accepted = self._engine.num_draft_tokens
            extra |= {"draft_tokens": drafts - num_drafts, "accepted_draft_tokens": accepted - num_accepted}
        if profile:
            with op_times() as ops:
                profiled = StepProfile(self._engine, ops)
                self._run(concurrency, min(_PROFILED_TOKENS, self._output_len), lambda count: None)
            extra |= profiled.split()
        return Report(
            model=self._engine.model.name,
            dtype=self._engine.model.dtype,
            concurrency=concurrency,
            prompt_len=self._prompt_len,
            output_len=self._output_len,
            duration=duration,
            traces=traces,
            extra=extra,
        )

    def _run(
        self,
        concurrency: int,
        output_len: int,
        on_tokens: Callable[[int], None],
        steps: StepRecorder | None = None,
    ) -> list[RequestTrace]:
        """Runs requests with new prompts, so that no run finds another run's blocks in the prefix cache."""
        engine = self._engine
        prompts = random_prompts(concurrency, self._prompt_len, engine.model.vocab_size, next(self._seeds))
        sampling = pb.SamplingParams(
            **{parameter.name: parameter.default for parameter in PARAMETERS} | {"temperature": 0.0},  # type: ignore[arg-type]
            seed=0,
            n=1,
            ignore_eos=True,
            max_tokens=output_len,
            min_tokens=output_len,
        )
        traces: dict[int, RequestTrace] = {}
        for prompt in prompts:
            group = next(self._groups)
            traces[group] = RequestTrace(began=time.perf_counter(), token_times=[], token_counts=[])
            engine.submit(group, prompt, sampling)
        while engine.has_work:
            before = engine.times.total
            step = engine.step()
            now = time.perf_counter()
            if steps is not None and step.plan is not None:
                steps.add(step.plan, engine.times.total - before)
            for sequence in step.sequences:
                trace = traces[sequence.key[0]]
                trace.token_times.append(now)
                trace.token_counts.append(len(sequence.token_ids))
                if sequence.end is not None:
                    trace.ended, trace.error = now, sequence.end.message
            on_tokens(sum(len(sequence.token_ids) for sequence in step.sequences))
        return list(traces.values())


def _copy(times: StepTimes) -> StepTimes:
    return StepTimes(*astuple(times))


def _time_split(before: StepTimes, after: StepTimes) -> dict[str, object]:
    """Mean milliseconds of a step and of its parts; `other` is the runner's work around the model."""
    steps = after.num_steps - before.num_steps

    def mean_ms(part: str) -> float:
        return round((getattr(after, part) - getattr(before, part)) / steps * 1e3, 4)

    parts = {part: mean_ms(part) for part in ("scheduling", "forward", "sampling")}
    total = mean_ms("total")
    return {
        "num_steps": steps,
        "step_ms": total,
        **{f"step_{part}_ms": value for part, value in parts.items()},
        "step_other_ms": round(total - sum(parts.values()), 4),
    }


# As in vLLM's benchmark.
_PERCENTILES = (10, 25, 50, 75, 90, 99)


def measure_latency(
    bench: Bench, batch_size: int, *, num_iters: int, num_iters_warmup: int, on_done: Callable[[int], None]
) -> dict[str, object]:
    """Runs the batch num_iters times. on_done is called with 1 after each run, those of the warm-up included.

    Keys: model, dtype, batch_size, prompt_len, output_len, num_iters; latency_s, its mean, with _std, _min, _p10 to
    _p99; ttft_s and itl_ms, their medians over all runs and requests.
    """
    reports: list[Report] = []
    for number in range(num_iters_warmup + num_iters):
        # The warm-up of each measurement is the iterations before it.
        report = bench.measure(batch_size, profile=False, on_tokens=lambda count: None, warms_up=False)
        if number >= num_iters_warmup:
            reports.append(report)
        on_done(1)
    seconds = np.array([report.duration for report in reports])
    traces = [trace for report in reports for trace in report.traces]
    first = reports[0]
    return {
        "model": first.model,
        "dtype": first.dtype,
        "batch_size": batch_size,
        "prompt_len": first.prompt_len,
        "output_len": first.output_len,
        "num_iters": num_iters,
        "latency_s": round(float(seconds.mean()), 5),
        "latency_s_std": round(float(seconds.std()), 5),
        "latency_s_min": round(float(seconds.min()), 5),
        **{f"latency_s_p{p}": round(float(np.percentile(seconds, p)), 5) for p in _PERCENTILES},
        "ttft_s_p50": round(float(np.median([trace.ttft for trace in traces])), 5),
        "itl_ms_p50": round(float(np.median([gap for trace in traces for gap in trace.itl] or [0.0])) * 1e3, 4),
    }
