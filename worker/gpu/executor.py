"""Computes a model's steps on a GPU, in memory at fixed addresses, and the passes of a draft model.

Legend: T tokens of the step, S tokens whose logits are wanted, E hidden size, V vocabulary, P a rank's part of it.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from kernels.linear.residual import Residual
from worker.device.device import Device, Graph
from worker.layers.attention_plans import GpuAttentionPlans
from worker.layers.forward_context import Attend, EmbeddedInputs, ForwardContext, Workspace, call, forward_context
from worker.layers.kv_cache import KVCache
from worker.models.decoder import Model
from worker.parallel.groups import Groups
from worker.sampling.filters import SamplingKind
from worker.step.batch import GpuBatch, InputBatch


# It has one class, worker.gpu.graphs.CapturedGraphs, which imports the engine whose bodies it captures; the engine runs
# the graphs.
class StepGraphs(Protocol):
    """Graphs of the engine's bodies. If there is a graph for a step, the engine pads the step to the graph's size."""

    def padded(self, num_rows: int) -> int | None:
        """Returns the rows of the graph for a step of num_rows decodes, at most max_num_seqs; None: no graph."""
        ...

    def padded_with_drafts(self, num_tokens: int) -> int | None:
        """Returns the tokens of the graph for a step of decodes with drafts; None: no graph."""
        ...

    def run_forward(self, size: int, *, drafts: bool = False) -> None:
        """Replaces `worker.gpu.engine.GpuEngine.forward_body(size, drafts=drafts)`. size: from `padded` or
        `padded_with_drafts`."""
        ...

    def run_sample(self, kind: SamplingKind, size: int, *, drafts: bool = False) -> None:
        """Replaces its `sample_body(kind, size, drafts=drafts)`."""
        ...

    def padded_tokens(self, num_tokens: int) -> int | None:
        """Returns the tokens of the pieces for a step of num_tokens, at most max_num_batched_tokens; None: no
        pieces."""
        ...

    def run_pieces(self, batch: GpuBatch) -> Residual:
        """Replaces `model.forward(batch, kv_cache)`. The batch has as many tokens as `padded_tokens` returned (those
        beyond its last query are padding) and any number of rows; its inputs are already expanded."""
        ...

    def drop(self) -> None:
        """Drops all graphs, also ones in replay, so that collective calls that they hold can end."""
        ...


class PiecewiseGraph:
    """Graphs of a model's forward pass of one size, which is cut at each attention.

    Attention depends on a step's rows, so Python launches it in each step, under the step's own ForwardContext. All
    else depends on the number of tokens alone. Tensors between a piece and attention are in the model's workspace, at
    fixed addresses. Other memory of a piece is in the graphs' pool, and the next piece may reuse it: pieces always run
    in the order in which they were captured.
    """

    def __init__(self, device: Device, pool: object) -> None:
        self._device, self._pool = device, pool
        self._graph: Graph | None = None

    def run(self, body: Callable[[], object]) -> None:
        """Captures `body` in the first call, without useful results; later calls replay it."""
        if self._graph is None:
            self._graph = self._device.capture_pieces(body, self._pool)
        else:
            self._graph.replay()

    def between_graphs(self, attend: Attend) -> torch.Tensor:
        """See ForwardContext.between_graphs."""
        return self._device.between_graphs(attend)


class GpuExecutor:
    """Computes a model's steps: one engine's, or a draft model's."""

    def __init__(self, model: Model, groups: Groups | None = None) -> None:
        self.model, self.backend = model, model.backend
        # Replaced in each epoch, once its ranks are connected.
        self.groups = groups or Groups()
        self._workspace = Workspace(model.backend)
        self._plans: GpuAttentionPlans | None = None

    def reserve(self, *, max_tokens: int, max_rows: int, max_context: int, most_queries: int = 1) -> None:
        """Reserves memory for steps of at most this many tokens, rows and tokens of context per row. Call it before the
        first step. Addresses stay fixed until more is reserved."""
        self._workspace.reserve(max_tokens)
        self._plans = GpuAttentionPlans(
            self.model.config,
            self.backend,
            max_num_seqs=max_rows,
            max_context_len=max_context,
            most_queries=most_queries,
        )

    def forward(self, batch: GpuBatch, kv_cache: KVCache, pieces: PiecewiseGraph | None = None) -> Residual:
        """Computes the batch's tokens and writes their KV. Returns the residual stream after the last layer, [T, E], in
        memory that the next call reuses. pieces: graphs of the work between attentions."""
        assert self._plans is not None, "memory is reserved first"
        assert pieces is None or batch.embeddings_ME is None, "graphs read the embeddings of token ids"
        model, workspace = self.model, self._workspace
        with torch.inference_mode():
            context = ForwardContext(
                kv_cache=kv_cache,
                slots_T=batch.slots_T,
                cos_sin_tables=model.rotary(
                    batch.positions_T if batch.rope_positions_AT is None else batch.rope_positions_AT, workspace
                ),
                query_temperature_T=model.query_temperature(batch.positions_T, workspace),
                attention_plans=self._plans(batch),
                workspace=workspace,
                between_graphs=call if pieces is None else pieces.between_graphs,
                groups=self.groups,
                embedded=_embedded(batch),
            )
            with forward_context(context):
                if pieces is None:
                    model.forward(batch.token_ids_T)
                else:
                    pieces.run(lambda: model.forward(batch.token_ids_T))
            return self._stream(batch.num_tokens)

    def logits(self, hidden_SE: Residual, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns logits [S, V] of the compute dtype, from rows of `forward`'s result; applies the last norm, to these
        rows alone. out: memory for the result."""
        return self.model.head.logits(hidden_SE, self.groups.tensor, out)

    def write_part_of_logits(self, hidden_SE: Residual, out_SP: torch.Tensor) -> None:
        """Writes this rank's part of the logits to the first columns of `out_SP`."""
        self.model.head.write_part(hidden_SE, out_SP)

    def gather_logits(self, part_SP: torch.Tensor, out_SV: torch.Tensor) -> None:
        """Gathers the parts that all ranks have written, all of the same width, into logits [S, V]."""
        self.model.head.gather(part_SP, out_SV, self.groups.tensor)

    def likeliest(self, part_SP: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Finds the likeliest tokens over all ranks; see OutputHead.likeliest."""
        return self.model.head.likeliest(part_SP, self.groups.tensor)

    def _stream(self, num_tokens: int) -> Residual:
        """Returns the stream after the last layer, where the model left it, whether it ran or was replayed."""
        take, hidden_size = self._workspace.take, self.model.config.hidden_size
        x_TE = take("residual", num_tokens, hidden_size, dtype=torch.float32)
        return Residual(x_TE, take("delta", num_tokens, hidden_size), is_pending=True)


def _embedded(batch: GpuBatch) -> EmbeddedInputs | None:
    if batch.embedded_places_M is None or batch.embeddings_ME is None:
        return None
    return EmbeddedInputs(batch.embedded_places_M, batch.embeddings_ME)


class GpuDraftExecutor:
    """A worker.models.drafting.draft_model.DraftExecutor: batches come from the host, and tokens go back to it.

    The host waits for each pass. Passes follow the model's steps on the device's one stream."""

    def __init__(
        self, model: GpuExecutor, *, vocab_size: int, max_tokens: int, max_rows: int, max_context: int
    ) -> None:
        self._model, self.backend, self._vocab_size = model, model.backend, vocab_size
        model.reserve(max_tokens=max_tokens, max_rows=max_rows, max_context=max_context)

    def wanted(self, batch: InputBatch, kv_cache: KVCache) -> Residual:
        """Computes all tokens. Returns the hidden states of the batch's logit_indices."""
        device = self.backend.device
        starts_S = torch.from_numpy(batch.query_starts)
        hidden_TE = self._model.forward(
            GpuBatch(
                token_ids_T=batch.token_ids_T.to(device, torch.int32),
                positions_T=batch.positions_T.to(device, torch.int32),
                slots_T=batch.slots_T.to(device),
                rows_S=torch.arange(batch.num_rows, dtype=torch.int32, device=device),
                query_starts=starts_S.to(device),
                context_lens_S=torch.from_numpy(batch.context_lens_S).to(device),
                block_tables_RB=torch.from_numpy(batch.block_tables_SB).contiguous().to(device),
                max_query_len=int(starts_S.diff().max()),
            ),
            kv_cache,
        )
        return hidden_TE[batch.logit_indices.to(device)]

    def logits(self, hidden: Residual) -> torch.Tensor:
        """Returns float32 logits [S, V] on the host."""
        return self._logits(hidden).float().cpu()

    def greedy(self, batch: InputBatch, kv_cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the likeliest token after each of the batch's logit_indices (int64 [L]) and its logit (float32 [L]),
        on the host; the logit is not finite if one of the position is not."""
        from kernels.sampling.triton import greedy  # imports Triton

        ids_L, largest_L = greedy(self._logits(self.wanted(batch, kv_cache)))
        return ids_L.long().cpu(), largest_L.cpu()

    def _logits(self, hidden: Residual) -> torch.Tensor:
        backend = self.backend
        out_SV = torch.empty(len(hidden), self._vocab_size, dtype=backend.compute_dtype, device=backend.device)
        return self._model.logits(hidden, out_SV)


class StepLogits:
    """Logits in memory at fixed addresses, where graphs that choose tokens read them: whole, or this rank's part (the
    last rank's may be smaller), gathered from all ranks only if a step needs it."""

    def __init__(self, model: GpuExecutor, num_positions: int, vocab_size: int) -> None:
        """num_positions: positions whose logits exist at once."""
        backend = model.backend
        self._model, self.are_divided = model, backend.shard.size > 1
        self._whole_LV = torch.empty(num_positions, vocab_size, dtype=backend.compute_dtype, device=backend.device)
        self._part_LP = self._whole_LV
        if self.are_divided:
            width = -(-vocab_size // backend.shard.size)
            # Zeros: the last rank's part may be narrower, but all of this is sent.
            self._part_LP = torch.zeros(num_positions, width, dtype=backend.compute_dtype, device=backend.device)

    def __len__(self) -> int:
        return len(self._whole_LV)

    def write(self, hidden: Residual, size: int) -> None:
        """Writes the logits of `size` positions, or this rank's part of them."""
        if self.are_divided:
            self._model.write_part_of_logits(hidden, self._part_LP[:size])
            return
        logits_LV = self._whole_LV[:size]
        written = self._model.logits(hidden, out=logits_LV)
        # Otherwise graphs that choose tokens would read the logits of an earlier step.
        assert written.data_ptr() == logits_LV.data_ptr(), "the model put its logits elsewhere"

    def gather(self, size: int) -> None:
        """Fills `whole` with what all ranks have written."""
        if self.are_divided:
            self._model.gather_logits(self._part_LP[:size], self._whole_LV[:size])

    def whole(self, size: int) -> torch.Tensor:
        """Returns the logits [size, V], always in the same memory; if divided, those that were gathered last."""
        return self._whole_LV[:size]

    def likeliest(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the likeliest tokens of divided logits without gathering those: int64 ids [size], and their float32
        logits, not finite if any of the position's logits is not."""
        assert self.are_divided
        return self._model.likeliest(self._part_LP[:size])
