"""CUDA graphs of steps: captured at the start, replayed for any step that fits a graph's size."""

import gc
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from kernels.linear.residual import Residual
from worker.device.device import Device, Graph
from worker.gpu.engine import GpuEngine, most_logits
from worker.gpu.executor import GpuExecutor, PiecewiseGraph
from worker.layers.kv_cache import KVCache
from worker.sampling.filters import SamplingKind
from worker.step.batch import GpuBatch

if TYPE_CHECKING:
    # Options need pydantic, which benchmarks of the engine do without.
    from configs.groups.compilation import GraphLevel

_log = logging.getLogger("octavo.worker")

# vLLM's sizes, for full graphs.
_LARGEST_DEFAULT = 512
_DEFAULTS = (1, 2, 4, *range(8, 256, 8), *range(256, _LARGEST_DEFAULT + 1, 16))
# Pieces go on beyond. Python took 25 ms to launch a step of Llama-3.1-8B (measured on an H200), in which it computes
# some 1,600 tokens.
_LARGEST_PIECES = 2048
_DEFAULT_PIECES = (*_DEFAULTS, 640, 768, 1024, 1280, 1536, _LARGEST_PIECES)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSizes:
    """Sizes of graphs, ascending. A step is padded to the next size."""

    # Rows of decode-only steps, whose forward pass is one graph.
    decodes: tuple[int, ...] = ()
    # Tokens of decode-only steps with drafts, whose forward pass is one graph.
    drafts: tuple[int, ...] = ()
    # Tokens of any step, which runs as pieces between attentions.
    pieces: tuple[int, ...] = ()

    def for_decodes(self, num_rows: int) -> int | None:
        """Returns the size of the graph for num_rows decodes, or None if no graph is large enough."""
        return _next(self.decodes, num_rows)

    def for_drafts(self, num_tokens: int) -> int | None:
        """Returns the size of the graph for decodes with drafts of num_tokens, or None if no graph is large enough."""
        return _next(self.drafts, num_tokens)

    def for_pieces(self, num_tokens: int) -> int | None:
        """Returns the size of the pieces for num_tokens, or None if none are large enough."""
        return _next(self.pieces, num_tokens)


def _next(sizes: tuple[int, ...], wanted: int) -> int | None:
    index = bisect_left(sizes, wanted)
    return sizes[index] if index < len(sizes) else None


def graph_sizes(
    level: "GraphLevel",
    capture_sizes: Sequence[int],
    *,
    enforce_eager: bool,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    most_drafts: int = 0,
) -> GraphSizes:
    """Returns the sizes that compilation_config and enforce_eager ask for, limited to what a step can have.

    most_drafts: drafts of a row in a step; 0: no graphs of steps with drafts.

    capture_sizes: any order. Empty: 1, 2, 4, multiples of 8 up to 256 and of 16 up to 512, as far as they are below the
    largest step, and the largest step itself (at most 512), so that a max_num_seqs between these sizes has a graph;
    for pieces also 640, 768, 1024, 1280, 1536 and 2048, and the largest step itself is at most 2048.

    As in vLLM, sizes that no step can have are left out (here with a warning), and sizes above max_num_seqs are for
    pieces alone, since each row of a full graph has one token.

    Raises ValueError if graphs are asked for but no size remains.
    """
    if level == "NONE" or enforce_eager:
        return GraphSizes()
    most_decodes = min(max_num_seqs, max_num_batched_tokens)
    # A graph chooses the tokens of one slice of logits.
    num_logits = most_logits(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    most_with_drafts = min(max_num_seqs * (most_drafts + 1), num_logits) if most_drafts and level == "FULL" else 0

    def with_drafts(sizes: Sequence[int]) -> tuple[int, ...]:
        return tuple(size for size in sizes if 2 <= size <= most_with_drafts)

    if not capture_sizes:
        return GraphSizes(
            decodes=_defaults(most_decodes) if level == "FULL" else (),
            drafts=with_drafts(_defaults(most_with_drafts)),
            pieces=_defaults(max_num_batched_tokens, _DEFAULT_PIECES),
        )
    sizes = sorted(set(capture_sizes))
    possible = tuple(size for size in sizes if size <= max_num_batched_tokens)
    if not possible:
        raise ValueError(
            f"compilation_config.cudagraph_capture_sizes={sizes}: no step has more than "
            f"max_num_batched_tokens={max_num_batched_tokens} tokens; give sizes up to that, or none for the default "
            "sizes, or enforce_eager for no graphs"
        )
    if len(possible) < len(sizes):
        _log.warning(
            "compilation_config.cudagraph_capture_sizes: %s left out, since no step has more than "
            "max_num_batched_tokens=%d tokens",
            sizes[len(possible) :],
            max_num_batched_tokens,
        )
    decodes = tuple(size for size in possible if size <= most_decodes) if level == "FULL" else ()
    if level == "FULL" and not decodes:
        _log.warning(
            "compilation_config.cudagraph_capture_sizes=%s: steps that only decode run in pieces, since none of these "
            "sizes is within max_num_seqs=%d",
            sizes,
            max_num_seqs,
        )
    return GraphSizes(decodes=decodes, drafts=with_drafts(possible), pieces=possible)


def _defaults(most: int, sizes: tuple[int, ...] = _DEFAULTS) -> tuple[int, ...]:
    most = min(most, sizes[-1])
    return (*(size for size in sizes if size < most), most)


class CapturedGraphs:
    """The StepGraphs of an engine.

    A decode-only step runs as two graphs: the forward pass with its inputs and logits, and the choice of tokens, with
    one graph per SamplingKind. Steps with drafts have such graphs of their own, by their number of tokens, for any
    numbers of drafts. Other steps run their forward pass in pieces. All graphs share one memory pool and are captured
    from the largest to the smallest size, so that each reuses the memory of those before it.
    """

    def __init__(
        self,
        engine: GpuEngine,
        model: GpuExecutor,
        kv_cache: KVCache,
        device: Device,
        sizes: GraphSizes,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        """Captures nothing yet. settle: called when a warm-up step, which all ranks compute, is queued on the device,
        before anything waits for it."""
        self._engine, self._model, self._kv_cache, self._device = engine, model, kv_cache, device
        self._sizes, self._settle = sizes, settle
        self._pool = device.graph_pool()
        # By size, and whether rows have drafts.
        self._forward: dict[tuple[int, bool], Graph] = {}
        self._sample: dict[tuple[SamplingKind, int, bool], Graph] = {}
        self._pieces: dict[int, PiecewiseGraph] = {}
        # Steps since the start that ran as one graph, and in pieces.
        self.num_full = 0
        self.num_in_pieces = 0
        # GPU memory that all graphs take.
        self.num_bytes = 0

    def capture(self) -> None:
        """Captures all sizes. The engine's rows are padding, so only scratch memory of steps is written."""
        started = time.perf_counter()
        # Frees unreachable pinned memory of earlier engines now: freeing it during a capture would add an event to the
        # graph.
        gc.collect()
        # Pieces first: they usually have the largest sizes.
        for size in reversed(self._sizes.pieces):
            self.num_bytes += self.capture_pieces(size)
        for size in reversed(self._sizes.drafts):
            self.num_bytes += self.capture_decodes(size, drafts=True)
        for size in reversed(self._sizes.decodes):
            self.num_bytes += self.capture_decodes(size)
        _log.info(
            "CUDA graphs: %d sizes of decodes, %d of decodes with drafts, %d of pieces, %.2f GiB, %.1f s",
            len(self._sizes.decodes),
            len(self._sizes.drafts),
            len(self._pieces),
            self.num_bytes / 2**30,
            time.perf_counter() - started,
        )

    def capture_decodes(self, size: int, *, drafts: bool = False) -> int:
        """Captures the graphs of a decode-only step of `size` tokens. Returns the bytes that they take."""

        def forward() -> None:
            self._engine.forward_body(size, drafts=drafts)

        def sample(kind: SamplingKind) -> None:
            self._engine.sample_body(kind, size, drafts=drafts)

        def warm_up() -> None:
            forward()
            for kind in SamplingKind:
                sample(kind)

        def capture() -> None:
            self._forward[size, drafts] = self._device.capture(forward, self._pool)
            for kind in SamplingKind:
                self._sample[kind, size, drafts] = self._device.capture(partial(sample, kind), self._pool)

        return self._measured(warm_up, capture)

    def capture_pieces(self, size: int) -> int:
        """Captures the pieces of a step of `size` tokens. Returns the bytes that they take."""
        batch = self._engine.pieces_batch(size)
        pieces = self._pieces[size] = PiecewiseGraph(self._device, self._pool)
        return self._measured(
            lambda: self._model.forward(batch, self._kv_cache),
            lambda: self._model.forward(batch, self._kv_cache, pieces),
        )

    def _measured(self, warm_up: Callable[[], object], capture: Callable[[], object]) -> int:
        # Runs the step before the capture: it compiles kernels for this size, and allocates memory that is kept.
        with torch.inference_mode():
            warm_up()
            self._settle()
            before = self._device.memory().free
            capture()
        return max(0, before - self._device.memory().free)

    def drop(self) -> None:
        """Drops all graphs, also ones in replay, so that collective calls that they hold can end."""
        self._forward.clear()
        self._sample.clear()
        self._pieces.clear()

    # --- worker.gpu.executor.StepGraphs.

    def padded(self, num_rows: int) -> int | None:
        return self._sizes.for_decodes(num_rows)

    def padded_with_drafts(self, num_tokens: int) -> int | None:
        return self._sizes.for_drafts(num_tokens)

    def run_forward(self, size: int, *, drafts: bool = False) -> None:
        self._forward[size, drafts].replay()
        self.num_full += 1

    def run_sample(self, kind: SamplingKind, size: int, *, drafts: bool = False) -> None:
        self._sample[kind, size, drafts].replay()

    def padded_tokens(self, num_tokens: int) -> int | None:
        return self._sizes.for_pieces(num_tokens)

    def run_pieces(self, batch: GpuBatch) -> Residual:
        self.num_in_pieces += 1
        return self._model.forward(batch, self._kv_cache, self._pieces[batch.num_tokens])


def graph_memory_estimate(
    engine: GpuEngine, model: GpuExecutor, kv_cache: KVCache, device: Device, sizes: GraphSizes
) -> int:
    """Estimates the bytes that graphs of these sizes will take. Captures the two largest of each kind, and
    assumes that all others cost as much as the second: they, too, reuse the first one's memory. The captured graphs are
    dropped. kv_cache: of any size, such as two blocks; graphs do not depend on it.
    """
    graphs = CapturedGraphs(engine, model, kv_cache, device, sizes)
    total = 0
    gc.collect()  # as `CapturedGraphs.capture` does
    with_drafts = partial(graphs.capture_decodes, drafts=True)
    for captured, capture in (
        (sizes.pieces, graphs.capture_pieces),
        (sizes.drafts, with_drafts),
        (sizes.decodes, graphs.capture_decodes),
    ):
        costs = [capture(size) for size in captured[:-3:-1]]
        total += sum(costs) + sum(costs[-1:]) * (len(captured) - len(costs))
    return total
