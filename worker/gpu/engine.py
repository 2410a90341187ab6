"""Computes steps on a GPU without ever waiting for it: a step is begun while those before it are under way.

Shape suffixes: S rows of the batch, T tokens, L scored positions, V vocabulary.
"""

from typing import Protocol

import torch

from kernels.linear.residual import Residual
from worker.forward_context import Pieces
from worker.gpu.batch import GpuBatch
from worker.gpu.device import Device
from worker.gpu.pending import PendingStep
from worker.gpu.sampling import SamplingKind
from worker.gpu.step_inputs import StepInputs
from worker.kv_cache import KVCache


class GpuModel(Protocol):
    """What the engine needs of a model."""

    def reserve(self, max_tokens: int, max_rows: int, max_context: int) -> None:
        """Once, before anything else: all memory of a step is at fixed addresses from then on."""
        ...

    def forward(self, batch: GpuBatch, kv_cache: KVCache, pieces: Pieces | None = None) -> Residual:
        """Of the batch's T tokens, whose KV it writes; memory that the next call uses again. pieces: graphs of what
        lies between attentions."""
        ...

    def logits(self, hidden: Residual) -> torch.Tensor:
        """[L, V] of the compute dtype."""
        ...


class StepGraphs(Protocol):
    """Graphs of the engine's bodies. The engine never computes without padding what has a graph."""

    def padded(self, num_rows: int) -> int | None:
        """Rows of the graph that a step of so many decodes runs in, max_num_seqs at most; None: there is none."""
        ...

    def run_forward(self, size: int) -> None:
        """Does what `GpuEngine.forward_body(size)` does. size: of `padded`."""
        ...

    def run_sample(self, kind: SamplingKind, size: int) -> None:
        """Does what `GpuEngine.sample_body(kind, size)` does."""
        ...

    def padded_tokens(self, num_tokens: int) -> int | None:
        """Tokens of the pieces that a step of so many runs in, max_num_batched_tokens at most; None: there are
        none."""
        ...

    def run_pieces(self, batch: GpuBatch) -> Residual:
        """Does what `model.forward(batch, kv_cache)` does. The batch has as many tokens as `padded_tokens` said (those
        beyond its last query are padding) and any number of rows; its inputs are expanded already."""
        ...


class GpuEngine:
    """Permanent rows on the device, and the computation of steps over them.

    All its work goes to the device's one stream, in order; nothing that it does in a step waits for the device, except
    for memory of the step max_steps_in_flight + 1 before.
    """

    def __init__(
        self,
        model: GpuModel,
        kv_cache: KVCache,
        device: Device,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        vocab_size: int,
        max_steps_in_flight: int,
        graphs: StepGraphs | None = None,
    ) -> None:
        """Reserves the model's memory. Inputs are padding until the first step, so the bodies can be run and captured
        at once: they change nothing but their own memory."""
        # What decodes run in; may be set, or taken away, between steps.
        self.graphs = graphs

    def begin(self, inputs: StepInputs) -> PendingStep:
        """Gives the device all of a step's work. Steps that were begun before may be under way."""
        raise NotImplementedError

    def forward_body(self, size: int) -> None:
        """Of a step that only decodes, `size` rows with padding: expands what the host sent to the batch's tensors,
        runs the model and puts logits [size, V] where `sample_body` reads them. Reads and writes static memory only:
        one graph for each size serves every step.
        """
        raise NotImplementedError

    def sample_body(self, kind: SamplingKind, size: int) -> None:
        """The tokens of such a step, and what rows remember of them. One graph for each kind and size."""
        raise NotImplementedError

    def pieces_batch(self, num_tokens: int) -> GpuBatch:
        """What `StepGraphs.run_pieces` gets in steps that are padded to so many tokens, to capture them with: in the
        memory of every step's inputs, one row of padding."""
        raise NotImplementedError

    def reset(self) -> None:
        """Waits for all that is under way, and forgets every row."""
        raise NotImplementedError
