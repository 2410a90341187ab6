"""One model with its engine, its KV cache and its graphs, and the ways to run it."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.gpu.end_to_end.random_weights import RandomWeights
from benchmarks.gpu.end_to_end.schedule import Schedule
from benchmarks.gpu.end_to_end.shapes import Variant
from kernels.backend import Backend, gpu_backend
from worker.device.device import Device
from worker.gpu.engine import GpuEngine
from worker.gpu.executor import GpuExecutor
from worker.gpu.graphs import CapturedGraphs, graph_sizes
from worker.layers.kv_cache import KVCache
from worker.models.families.llama import LlamaModel
from worker.sampling.filters import SamplingKind

BLOCK_SIZE = 16
MAX_STEPS_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    # Sizes of graphs; empty: the usual ones.
    capture_sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to give steps to the device."""

    graphs: bool
    # With two, the host prepares a step while the device computes the one before.
    num_in_flight: int

    @property
    def name(self) -> str:
        return ("graphs" if self.graphs else "eager") + (", overlap" if self.num_in_flight > 1 else "")


WAYS = tuple(
    Way(graphs=graphs, num_in_flight=num_in_flight)
    for num_in_flight in (MAX_STEPS_IN_FLIGHT, 1)
    for graphs in (True, False)
)


def path_of(variant: Variant, device: torch.device) -> Backend:
    return gpu_backend(torch.bfloat16, device, kv_cache_dtype=variant.kv_cache_dtype)


class ModelRun:
    def __init__(self, variant: Variant, device: Device, limits: Limits, num_blocks: int) -> None:
        """num_blocks: of the KV cache, including the null block. Captures no graphs yet."""
        self.variant, self.limits = variant, limits
        self._device = device
        path = path_of(variant, device.torch_device)
        weights = RandomWeights(variant, device.torch_device, path.compute_dtype)
        model = GpuExecutor(LlamaModel(variant.config, weights, path))
        self.kv_cache = KVCache(variant.config, num_blocks=num_blocks, block_size=BLOCK_SIZE, backend=path)
        for layer in self.kv_cache.layers:
            # Zeros draw less power than the real contents of a cache.
            layer.copy_(torch.randn(layer.shape, dtype=torch.bfloat16, device=layer.device))
        self.engine = GpuEngine(
            model,
            self.kv_cache,
            device,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
            vocab_size=variant.config.vocab_size,
            max_steps_in_flight=MAX_STEPS_IN_FLIGHT,
        )
        sizes = graph_sizes(
            "FULL",
            limits.capture_sizes,
            enforce_eager=False,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
        )
        self.graphs = CapturedGraphs(self.engine, model, self.kv_cache, device, sizes)

    def run(self, schedule: Schedule, way: Way, may_go_on: Callable[[], bool] = lambda: True) -> list[float]:
        """Runs a schedule on an idle device. Returns time.perf_counter() at the start and when each step's results were
        there. may_go_on: asked before each step; if it returns false, the schedule stops before it is done."""
        self.engine.reset()
        self.engine.graphs = self.graphs if way.graphs else None
        self._device.synchronize()
        times = [time.perf_counter()]
        pending = deque()
        while pending or not schedule.is_done:
            # Without overlap the host does nothing while the device computes.
            if len(pending) == way.num_in_flight or schedule.is_done or not may_go_on():
                if not pending:
                    break
                inputs, step = pending.popleft()
                schedule.take(inputs, step.wait())
                times.append(time.perf_counter())
            else:
                inputs = schedule.next()
                pending.append((inputs, self.engine.begin(inputs)))
        return times

    def device_seconds(self, num_rows: int, repetitions: int) -> float:
        """Device time of a decode step like the last one that ran: replays its graphs back to back, with no work of the
        host in between."""
        size = self.graphs.padded(num_rows)
        assert size is not None, "every number of decodes has a graph"
        begin, end = self._device.event(), self._device.event()
        begin.record()
        for _ in range(repetitions):
            self.graphs.run_forward(size)
            self.graphs.run_sample(SamplingKind.GREEDY, size)
        end.record()
        end.synchronize()
        return end.seconds_since(begin) / repetitions
