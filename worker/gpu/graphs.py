"""CUDA graphs of steps: captured at the start, replayed for steps of any rows that fit."""

import gc
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from kernels.linear.residual import Residual
from worker.device.device import Device, Graph
from worker.gpu.engine import GpuEngine
from worker.gpu.executor import GpuModel
from worker.layers.kv_cache import KVCache
from worker.sampling.filters import SamplingKind
from worker.step.batch import GpuBatch

_log = logging.getLogger("octavo.worker")

GraphLevel = Literal["NONE", "PIECEWISE", "FULL"]

# Those of vLLM. Beyond 512 tokens a step computes for longer than Python takes to launch its kernels.
_LARGEST_DEFAULT = 512
_DEFAULTS = (1, 2, 4, *range(8, 256, 8), *range(256, _LARGEST_DEFAULT + 1, 16))


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSizes:
    """Ascending. A step runs as the graph of the next size, with padding."""

    # Rows of a step that only decodes, which runs as one graph.
    decodes: tuple[int, ...] = ()
    # Tokens of any step, which runs as pieces between attentions.
    pieces: tuple[int, ...] = ()

    def for_decodes(self, num_rows: int) -> int | None:
        """The size whose graph computes so many decodes. None: there is none as large."""
        return _next(self.decodes, num_rows)

    def for_pieces(self, num_tokens: int) -> int | None:
        """The size whose pieces compute so many tokens. None: there is none as large."""
        return _next(self.pieces, num_tokens)


def _next(sizes: tuple[int, ...], wanted: int) -> int | None:
    index = bisect_left(sizes, wanted)
    return sizes[index] if index < len(sizes) else None


def graph_sizes(
    level: GraphLevel,
    capture_sizes: Sequence[int],
    *,
    enforce_eager: bool,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> GraphSizes:
    """What compilation_config and enforce_eager ask for, as far as steps can be that large.

    capture_sizes: any order. Empty: 1, 2, 4, multiples of 8 up to 256 and of 16 up to 512, below what a step can have
    at most, and that itself: no step of decodes is left without a graph for a max_num_seqs that is none of them.

    As in vLLM, a size that no step can have is left out, with a warning here; and a size above max_num_seqs is for
    pieces alone, since each row of a full graph has one token.

    Raises ValueError if that leaves no size at all, although graphs were asked for.
    """
    if level == "NONE" or enforce_eager:
        return GraphSizes()
    most_decodes = min(max_num_seqs, max_num_batched_tokens)
    if not capture_sizes:
        return GraphSizes(
            decodes=_defaults(most_decodes) if level == "FULL" else (), pieces=_defaults(max_num_batched_tokens)
        )
    sizes = sorted(set(capture_sizes))
    possible = tuple(size for size in sizes if size <= max_num_batched_tokens)
    if not possible:
        raise ValueError(
            f"compilation_config.cudagraph_capture_sizes={sizes}: no step has more than "
            f"max_num_batched_tokens={max_num_batched_tokens} tokens; give sizes up to that, or none for the usual "
            "ones, or enforce_eager for no graphs"
        )
    if len(possible) < len(sizes):
        _log.warning(
            "compilation_config.cudagraph_capture_sizes: %s left out, for no step has more than "
            "max_num_batched_tokens=%d tokens",
            sizes[len(possible) :],
            max_num_batched_tokens,
        )
    decodes = tuple(size for size in possible if size <= most_decodes) if level == "FULL" else ()
    if level == "FULL" and not decodes:
        _log.warning(
            "compilation_config.cudagraph_capture_sizes=%s: steps that only decode run in pieces, for none of these is "
            "within max_num_seqs=%d",
            sizes,
            max_num_seqs,
        )
    return GraphSizes(decodes=decodes, pieces=possible)


def _defaults(most: int) -> tuple[int, ...]:
    most = min(most, _LARGEST_DEFAULT)
    return (*(size for size in _DEFAULTS if size < most), most)


class PiecewiseGraph:
    """worker.layers.forward_context.Pieces of one size, for a model's forward.

    Attention's work depends on a step's rows, so it is launched by Python in each step, under the step's own
    ForwardContext; all else depends on the number of tokens alone. What passes from a piece to attention and back is in
    the model's workspace, which stays in place. What a piece allocates beside it is in the graphs' pool, and may be
    used again by the next piece: in each step they run in the order in which they were captured.
    """

    def __init__(self, device: Device, pool: object) -> None:
        self._device, self._pool = device, pool
        self._graph: Graph | None = None

    def run(self, body: Callable[[], object]) -> None:
        """The first call captures what `body` does, and computes nothing that counts; those that follow replay it."""
        if self._graph is None:
            self._graph = self._device.capture_pieces(body, self._pool)
        else:
            self._graph.replay()

    def between_graphs(self, attend: Callable[[], torch.Tensor]) -> torch.Tensor:
        return self._device.between_graphs(attend)


class CapturedGraphs:
    """worker.gpu.engine.StepGraphs.

    A step that only decodes is two of them: the forward pass with its inputs and logits, and the choice of tokens, of
    which there is one for each kind. Other steps run their forward pass in pieces. All are captured from the largest to
    the smallest size with one pool of memory, so that each finds there what the ones before it took.
    """

    def __init__(
        self,
        engine: GpuEngine,
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
        self._pieces: dict[int, PiecewiseGraph] = {}
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
        pieces = self._pieces[size] = PiecewiseGraph(self._device, self._pool)
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
    engine: GpuEngine, model: GpuModel, kv_cache: KVCache, device: Device, sizes: GraphSizes
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
