"""The systems to plan for: a measured engine, or GPUs by name. Each turns a setting into a core and its costs.

A measured engine is calibrated with runs of a cluster: they tell what router, sockets and shared cores add to its
steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from scipy.optimize import nnls

from configs.groups.parallel import default_steps_in_flight
from configs.options import Options
from octavo.lab.errors import PlanError
from octavo.lab.settings import LAYOUT, Setting
from octavo.plan.costs.fitted import Fitted, fit
from octavo.plan.costs.hardware import Gpu, Interconnect
from octavo.plan.costs.model_shape import ModelShape
from octavo.plan.costs.roofline import Placement, Roofline, fit_memory
from octavo.plan.costs.samples import Measurements, ServeResult
from octavo.plan.costs.step_shape import CostModel
from octavo.plan.simulate import simulate
from octavo.plan.workload import Workload, parse_lengths, synthesize
from protos import inference_pb2
from scheduler.core.messages import CoreSettings
from scheduler.settings import core_settings

# Priors on the three numbers, so that a few noisy results do not set them freely: a factor off by 10% costs as much as
# a result missed by 1%; added seconds that take 10% of the time cost as much as one missed by 7%. So the factor
# explains what all results have in common, and the added seconds what differs between few rows and many.
_FACTOR_PRIOR, _ADDED_PRIOR = 0.1, 0.7
# Few rounds: the number of steps hardly depends on how long steps take.
_NUM_ROUNDS = 3


def calibrate(engine: Fitted, results: Sequence[ServeResult], settings: CoreSettings, *, num_replicas: int) -> Fitted:
    """Chooses factor, step_seconds and token_seconds so that simulated runs take as long as the measured ones.

    results: from a cluster with these settings and replicas. All three are at least 0, and the factor is near 1.
    """
    found = engine
    for _ in range(_NUM_ROUNDS):
        shares = np.array([_shares(result, found, settings, num_replicas) for result in results])
        weight = np.diag((_FACTOR_PRIOR, _ADDED_PRIOR, _ADDED_PRIOR)) * np.sqrt(len(results))
        scale = np.maximum(shares.mean(axis=0), 1e-300)
        targets = np.concatenate((np.ones(len(results)), weight @ (scale[0], 0.0, 0.0)))
        factor, step, token = nnls(np.vstack((shares / scale, weight)), targets)[0] / scale
        found = replace(engine, factor=max(float(factor), 1e-3), step_seconds=float(step), token_seconds=float(token))
    return found


def _shares(result: ServeResult, found: Fitted, settings: CoreSettings, num_replicas: int) -> tuple[float, ...]:
    """Shares of the measured time that a factor of 1, one second per step, and one second per token take."""
    run = simulate(settings, found, _workload(result, settings.max_model_len), num_replicas=num_replicas)
    steps, tokens = run.num_steps / num_replicas, run.num_output_tokens / num_replicas
    engine = (run.duration - found.step_seconds * steps - found.token_seconds * tokens) / found.factor
    return engine / result.duration, steps / result.duration, tokens / result.duration


def _workload(result: ServeResult, max_model_len: int) -> Workload:
    return synthesize(
        num_requests=result.num_requests,
        rate=result.request_rate,
        concurrency=result.concurrency,
        prompt_len=parse_lengths(str(result.prompt_len), "prompt_len"),
        output_len=parse_lengths(str(result.output_len), "output_len"),
        max_model_len=max_model_len,
    )


_GIB = 2**30


class Target(Protocol):
    @property
    def title(self) -> str:
        """A title for people."""
        ...

    @property
    def max_model_len(self) -> int: ...

    def prepare(self, setting: Setting, options: Options) -> tuple[CoreSettings, CostModel]:
        """options: with the setting's values. Raises DoesNotFit, or PlanError for a setting that this target cannot
        judge."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTarget:
    """The engine and machine on which steps were measured."""

    measurements: Measurements
    cost: Fitted
    max_model_len: int

    @property
    def title(self) -> str:
        cost, name = self.cost, self.measurements.model
        text = f"{name}, fitted to {cost.num_samples} measured samples (median error {cost.median_error:.1%})"
        if not self.measurements.serve:
            return text
        return (
            f"{text} and {len(self.measurements.serve)} runs of a cluster: {cost.factor:.2f} x the engine, "
            f"{cost.step_seconds * 1e3:.2f} ms per step, {cost.token_seconds * 1e6:.0f} us per token"
        )

    def prepare(self, setting: Setting, options: Options) -> tuple[CoreSettings, CostModel]:
        for name, size in zip(LAYOUT[:2], setting.layout[:2], strict=True):
            if size != 1:
                raise PlanError(
                    f"{name}={size}: the measured engine has one rank, which tells nothing about more; plan with --gpu "
                    "for that"
                )
        return measured_settings(self.measurements, options), self.cost


def measured_target(measurements: Measurements, options: Options) -> MeasuredTarget:
    """Fits and calibrates. options: those of the cluster whose runs (`octavo bench serve`) are measurements."""
    cost = fit(measurements.samples)
    settings = measured_settings(measurements, options)
    if measurements.serve:
        cost = calibrate(cost, measurements.serve, settings, num_replicas=options.data_parallel_size)
    return MeasuredTarget(measurements=measurements, cost=cost, max_model_len=settings.max_model_len)


def measured_settings(measurements: Measurements, options: Options) -> CoreSettings:
    """The core's settings with the measured blocks, except where options are given for them."""
    engine, given = measurements.engine, options.model_fields_set
    block_size = options.block_size if "block_size" in given else engine.block_size
    num_blocks = engine.num_blocks * engine.block_size // block_size
    num_swap_blocks = 0
    if options.num_blocks_override:
        num_blocks = options.num_blocks_override
    elif "kv_cache_memory" in given and engine.kv_cache_memory:
        num_blocks = int(num_blocks * options.kv_cache_memory / engine.kv_cache_memory)
    if options.preemption_mode == "swap":
        if not engine.kv_cache_memory:
            raise PlanError(
                "preemption_mode=swap: the size of a block is unknown, because the steps were measured with "
                "num_blocks_override; measure without it"
            )
        num_swap_blocks = int(options.swap_space / engine.kv_cache_memory * engine.num_blocks)
    max_model_len = min(options.max_model_len or engine.max_model_len, num_blocks * block_size)
    info = inference_pb2.ModelInfo(block_size=block_size, num_blocks=num_blocks, max_model_len=max_model_len)
    return core_settings(options, info, num_swap_blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTarget:
    """GPUs of one kind, their interconnect, and a model's shape."""

    gpu: Gpu
    model: ModelShape
    interconnect: Interconnect
    gpu_memory_utilization: float
    kv_value_bytes: float
    max_model_len: int

    @property
    def title(self) -> str:
        within, between = self.interconnect.within.name, self.interconnect.between.name
        node = f"{within} within {self.interconnect.gpus_per_node} GPUs"
        links = within if within == between else f"{node}, {between} between"
        return (
            f"{self.model.name} ({self.model.num_params / 1e9:.3g} B parameters, "
            f"{self.model.weight_bytes / _GIB:.1f} GiB) on {self.gpu.name}, {links}"
        )

    def prepare(self, setting: Setting, options: Options) -> tuple[CoreSettings, CostModel]:
        tensor, stages, _ = setting.layout
        placement = Placement(
            tensor_parallel_size=tensor, pipeline_parallel_size=stages, kv_value_bytes=self.kv_value_bytes
        )
        self._check(tensor, stages)
        memory = fit_memory(
            self.model,
            self.gpu,
            placement,
            gpu_memory_utilization=self.gpu_memory_utilization,
            block_size=options.block_size,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            min_tokens=options.max_model_len or 1,
        )
        num_blocks = options.num_blocks_override or memory.num_blocks
        block_bytes = memory.kv_cache / memory.num_blocks
        info = inference_pb2.ModelInfo(
            block_size=options.block_size,
            num_blocks=num_blocks,
            max_model_len=min(self.max_model_len, num_blocks * options.block_size),
        )
        swap_blocks = int(options.swap_space * _GIB // block_bytes) if options.preemption_mode == "swap" else 0
        settings = core_settings(options, info, swap_blocks)
        if "max_steps_in_flight" not in options.model_fields_set:
            given = {**dict(options), "pipeline_parallel_size": stages}
            settings = replace(settings, max_steps_in_flight=default_steps_in_flight(given))
        cost = Roofline(
            model=self.model,
            gpu=self.gpu,
            placement=placement,
            interconnect=self.interconnect,
            block_size=options.block_size,
        )
        return replace(settings, num_stages=stages), cost

    def _check(self, tensor: int, stages: int) -> None:
        model = self.model
        if not model.divides_among(tensor):
            raise PlanError(
                f"tensor_parallel_size={tensor} does not divide the {model.num_heads} heads and "
                f"{model.num_kv_heads} KV heads of {model.name} evenly"
            )
        if stages > model.num_layers:
            raise PlanError(f"pipeline_parallel_size={stages} exceeds the {model.num_layers} layers of {model.name}")
