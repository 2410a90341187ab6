"""CUDA graphs of steps: captured at the start, replayed for steps of any rows that fit."""

import gc
import logging
import time
from collections.abc import Callable
from typing import Protocol

import torch

from kernels.linear.residual import Residual
from worker.gpu.batch import GpuBatch
from worker.gpu.device import Device, Graph
from worker.gpu.engine import GpuModel
from worker.gpu.graphs.pieces import CapturedPieces
from worker.gpu.graphs.sizes import GraphSizes
from worker.gpu.sampling.sampling import SamplingKind
from worker.kv_cache import KVCache

_log = logging.getLogger("octavo.worker")


class CapturedEngine(Protocol):
    """What graphs are made of: worker.gpu.engine.GpuEngine."""

    def forward_body(self, size: int) -> None: ...
    def sample_body(self, kind: SamplingKind, size: int) -> None: ...
    def pieces_batch(self, num_tokens: int) -> GpuBatch: ...


class CapturedGraphs:
    """worker.gpu.engine.StepGraphs.

    A step that only decodes is two of them: the forward pass with its inputs and logits, and the choice of tokens, of
    which there is one for each kind. Other steps run their forward pass in pieces. All are captured from the largest to
    the smallest size with one pool of memory, so that each finds there what the ones before it took.
    """

    def __init__(
        self,
        engine: CapturedEngine,
        model: GpuModel,
        kv_cache: KVCache,
        device: Device,
        sizes: GraphSizes,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        """Captures nothing yet. settle: called when a step, of all ranks if there are several, has been given to the
        device, before anything waits for it."""
        self._engine, self._model, self._kv_cache, self._device = engine, model, kv_cache, device
        self._sizes, self._settle = sizes, settle
        self._pool = device.graph_pool()
        self._forward: dict[int, Graph] = {}
        self._sample: dict[tuple[SamplingKind, int], Graph] = {}
        self._pieces: dict[int, CapturedPieces] = {}
        # Steps since the start that ran as one graph, and in pieces.
        self.num_full = 0
        self.num_in_pieces = 0
        # That all graphs took of the GPU's memory.
        self.num_bytes = 0

    def capture(self) -> None:
        """All sizes. The engine's rows are padding: nothing but memory that steps compute in is written."""
        started = time.perf_counter()
        # Pinned memory that is garbage already, of an engine that measured something, may not be freed in a capture:
        # that would put an event into it.
        gc.collect()
        # Pieces first: of the largest steps, most of the time.
        for size in reversed(self._sizes.pieces):
            self.num_bytes += self.capture_pieces(size)
        for size in reversed(self._sizes.decodes):
            self.num_bytes += self.capture_decodes(size)
        _log.info(
            "CUDA graphs: %d sizes of decodes, %d of pieces, %.2f GiB, %.1f s",
            len(self._forward),
            len(self._pieces),
            self.num_bytes / 2**30,
            time.perf_counter() - started,
        )

    def capture_decodes(self, size: int) -> int:
        """The graphs of a step of so many rows. Gives the bytes that they took."""
        forward, sample = self._engine.forward_body, self._engine.sample_body

        def warm_up() -> None:
            forward(size)
            for kind in SamplingKind:
                sample(kind, size)

        def capture() -> None:
            self._forward[size] = self._device.capture(lambda: forward(size), self._pool)
            for kind in SamplingKind:
                self._sample[kind, size] = self._device.capture(lambda kind=kind: sample(kind, size), self._pool)

        return self._measured(warm_up, capture)

    def capture_pieces(self, size: int) -> int:
        """The pieces of a step of so many tokens. Gives the bytes that they took."""
        batch = self._engine.pieces_batch(size)
        pieces = self._pieces[size] = CapturedPieces(self._device, self._pool)
        return self._measured(
            lambda: self._model.forward(batch, self._kv_cache),
            lambda: self._model.forward(batch, self._kv_cache, pieces),
        )

    def _measured(self, warm_up: Callable[[], object], capture: Callable[[], object]) -> int:
        # The step itself, before the capture: it compiles kernels for this size, and takes the memory that stays.
        with torch.inference_mode():
            warm_up()
            self._settle()
            before = self._device.memory().free
            capture()
        return max(0, before - self._device.memory().free)

    def drop(self) -> None:
        """Gives all up, also those that are being replayed: calls of other ranks that they hold can end then."""
        self._forward.clear()
        self._sample.clear()
        self._pieces.clear()

    # --- worker.gpu.engine.StepGraphs.

    def padded(self, num_rows: int) -> int | None:
        return self._sizes.for_decodes(num_rows)

    def run_forward(self, size: int) -> None:
        self._forward[size].replay()
        self.num_full += 1

    def run_sample(self, kind: SamplingKind, size: int) -> None:
        self._sample[kind, size].replay()

    def padded_tokens(self, num_tokens: int) -> int | None:
        return self._sizes.for_pieces(num_tokens)

    def run_pieces(self, batch: GpuBatch) -> Residual:
        self.num_in_pieces += 1
        return self._model.forward(batch, self._kv_cache, self._pieces[batch.num_tokens])


def graph_memory_estimate(
    engine: CapturedEngine, model: GpuModel, kv_cache: KVCache, device: Device, sizes: GraphSizes
) -> int:
    """Bytes that graphs of these sizes will take: from capturing the two largest, of pieces and of decodes, and taking
    all others to cost what the second did, for the first one's memory serves them, too. kv_cache: any, such as one of
    two blocks; no graph knows how large it is. Nothing is left of what was captured.
    """
    graphs = CapturedGraphs(engine, model, kv_cache, device, sizes)
    total = 0
    gc.collect()  # as `CapturedGraphs.capture` does
    for captured, capture in ((sizes.pieces, graphs.capture_pieces), (sizes.decodes, graphs.capture_decodes)):
        costs = [capture(size) for size in captured[:-3:-1]]
        total += sum(costs) + sum(costs[-1:]) * (len(captured) - len(costs))
    return total
