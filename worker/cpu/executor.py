"""Computes a model's steps on a CPU: the first step is recorded, later steps replay the recording.

Legend: T tokens of the step, S tokens whose logits are wanted, E hidden size, V vocabulary.
"""

from collections.abc import Callable, Collection
from operator import is_

import torch

from kernels.attention.recurrent import RecurrentStep
from kernels.backend import Backend
from kernels.linear import Stream
from kernels.native.library import Recording
from kernels.sampling import TokenMasks
from worker.layers.attention_plans import CpuAttentionPlans, step_rows
from worker.layers.forward_context import (
    EmbeddedInputs,
    ExpertLoad,
    ForwardContext,
    KeptStates,
    TargetStates,
    WantedRows,
    Workspace,
    forward_context,
)
from worker.layers.kv_cache import KVCache
from worker.models.decoder import Model
from worker.parallel.groups import Groups
from worker.step.batch import InputBatch


class Replay:
    """Records the kernel calls of one step, and repeats them in the following steps.

    Python makes each call in each step instead if the kernels are PyTorch's, which can't be recorded, or if the calls
    differ from step to step.
    """

    def __init__(self, backend: Backend, *, records: bool = True) -> None:
        self._kernels = backend.native if records else None
        self._memory: tuple[object, ...] = ()
        self._recording: Recording | None = None

    def run(
        self, body: Callable[[], object], num_tokens: int, *, memory: tuple[object, ...], is_whole: bool = True
    ) -> None:
        """Runs `body`, or replays its recording if there is one for `memory`.

        body: makes the same kernel calls for any number of tokens, and does nothing else; it passes them the same
        addresses as long as `memory` holds the same objects. is_whole: False if it ends early this time, without calls
        that others make; then it is not recorded.
        """
        if self._kernels is not None and self._recording is not None and all(map(is_, memory, self._memory)):
            self._kernels.replay(self._recording, num_tokens)
            return
        # Not around whole steps: entering and leaving it takes 50 us when the weights have just evicted the CPU caches.
        with torch.inference_mode():
            if self._kernels is None or not is_whole:
                body()
                return
            with self._kernels.recording() as recording:
                body()
        self._recording, self._memory = recording, memory


class CpuExecutor:
    """Computes a model's steps. Its backend's native kernels also sample tokens."""

    def __init__(
        self,
        model: Model,
        groups: Groups | None = None,
        kept_layers: Collection[int] = (),
        *,
        keeps_states: bool = False,
    ) -> None:
        """keeps_states: `states` returns the hidden states of all tokens after the last layer, and before each of
        kept_layers."""
        config, backend = model.config, model.backend
        self.model, self.backend, self.hidden_size = model, backend, config.hidden_size
        # Replaced in each epoch, once its ranks are connected.
        self.groups = groups or Groups()
        self.expert_load: ExpertLoad | None = None
        if config.experts is not None:
            self.expert_load = ExpertLoad(config.experts, backend.stage.layers(config.num_layers))
        self._workspace = Workspace(backend)
        self._kept = KeptStates(kept_layers, backend) if kept_layers else None
        self._plans = CpuAttentionPlans(config, backend)
        self._recurrent_step = None if config.recurrence is None else RecurrentStep(backend)
        self._narrows = model.narrows and not keeps_states
        self._keeps_states = keeps_states
        self._forward, self._wanted, self._greedy = (Replay(backend, records=model.is_recordable) for _ in range(3))
        if backend.native is not None:
            backend.native.expect_pauses(are_long=not model.is_recordable)

    def incoming(self, num_tokens: int) -> torch.Tensor:
        """Returns the buffer, float32 [T, E], for the previous stage's `forward` result; to be written before the step
        (stages after the first)."""
        self._workspace.reserve(self.model.rows_for(num_tokens))
        return self._residual(num_tokens)

    def forward(self, batch: InputBatch, kv_cache: KVCache) -> torch.Tensor:
        """Computes the batch's tokens and writes their KV. Returns the residual stream after the last layer, [T, E], in
        memory that the next call reuses."""
        self._run(self._forward, self._compute, batch, kv_cache)
        return self._residual(batch.num_tokens)

    def wanted(self, batch: InputBatch, kv_cache: KVCache) -> torch.Tensor:
        """Computes the batch as `forward` does, but the last layer only for logit_indices where it can. Returns their
        rows, [L, E], which the next call may reuse."""
        if not self._narrows:
            hidden_TE = self.forward(batch, kv_cache)
            return hidden_TE if batch.num_logits == batch.num_tokens else hidden_TE[batch.logit_indices]
        self._run(self._wanted, self._compute, batch, kv_cache, narrows=True)
        return self._stream("wanted stream", batch.num_logits)

    def logits(self, hidden_SE: torch.Tensor) -> torch.Tensor:
        """Returns float32 logits [S, V] of rows of `forward`'s result; applies the last norm, to these rows alone."""
        return self.model.head.logits(hidden_SE, self.groups.tensor)

    def greedy(self, batch: InputBatch, kv_cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes the batch as `forward` does. Returns the likeliest token after each of its logit_indices (int64 [S])
        and its logit (float32 [S]), see kernels.sampling.greedy, in memory that the next call reuses. The logits
        themselves are not kept."""
        if self._narrows or batch.num_logits == batch.num_tokens:
            # The head is recorded together with the layers.
            self._run(self._greedy, self._compute_greedily, batch, kv_cache, narrows=self._narrows)
            likeliest = self._likeliest(batch.num_logits)
        else:
            likeliest = self.model.head.argmax(self.wanted(batch, kv_cache))
        group = self.groups.tensor
        return likeliest if group.size == 1 else self.model.head.likeliest_of_all(*likeliest, group)

    def masked_greedy(
        self, batch: InputBatch, kv_cache: KVCache, masks: Callable[[], TokenMasks]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Like `greedy`, of the tokens that masks leave; see PackedLinear.masked_argmax. masks: called after the
        forward pass. Only where this rank has the whole vocabulary."""
        assert self.groups.tensor.size == 1
        hidden_LE = self.wanted(batch, kv_cache)
        return self.model.head.masked_argmax(hidden_LE, masks())

    def states(self, num_tokens: int) -> TargetStates:
        """Returns the hidden states of the latest step, of num_tokens tokens, in memory that the next step reuses."""
        assert self._keeps_states
        kept = [] if self._kept is None else self._kept.of(num_tokens, self.hidden_size, self._workspace.take)
        return TargetStates(last_TE=self._residual(num_tokens), kept=kept)

    def _run(
        self,
        replay: Replay,
        body: Callable[[InputBatch, KVCache, bool], object],
        batch: InputBatch,
        kv_cache: KVCache,
        *,
        narrows: bool = False,
    ) -> None:
        """narrows: after the last layer only the batch's logit_indices are left."""
        self._workspace.reserve(self.model.rows_for(batch.num_tokens))
        if self._kept is not None:
            self._kept.reserve(batch.max_tokens)
        if batch.is_special:
            # Prefills alone: their tokens come from elsewhere, so the calls are made once, and are not recorded.
            with torch.inference_mode():
                body(batch, kv_cache, narrows)
            return
        memory = batch, kv_cache, self._workspace.memory
        is_whole = not narrows or batch.num_logits > 0
        replay.run(lambda: body(batch, kv_cache, narrows), batch.num_tokens, memory=memory, is_whole=is_whole)

    def _compute(self, batch: InputBatch, kv_cache: KVCache, narrows: bool) -> Stream:
        model, workspace = self.model, self._workspace
        if self._recurrent_step is not None and batch.num_tokens:
            self._recurrent_step.update(step_rows(batch, kv_cache))
        context = ForwardContext(
            kv_cache=kv_cache,
            slots_T=batch.slots_T,
            positions_T=batch.positions_T,
            cos_sin_tables=model.rotary(batch.rope_T, workspace),
            query_temperature_T=model.query_temperature(batch.positions_T, workspace),
            attention_plans=self._plans(batch, kv_cache) if batch.num_tokens else {},
            workspace=workspace,
            groups=self.groups,
            num_tokens_D=batch.num_tokens_D or (batch.num_tokens,),
            expert_load=self.expert_load,
            kept_states=self._kept,
            recurrent_step=self._recurrent_step,
            embedded=_embedded(batch),
            wanted=WantedRows(batch.logit_places, batch.logit_count, self.backend.native) if narrows else None,
        )
        with forward_context(context):
            return model.forward(batch.token_ids_T)

    def _compute_greedily(self, batch: InputBatch, kv_cache: KVCache, narrows: bool) -> None:
        hidden_LE = self._compute(batch, kv_cache, narrows)
        if len(hidden_LE):
            self.model.head.argmax(hidden_LE, out=self._likeliest(batch.num_logits))

    def _likeliest(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        take = self._workspace.take
        return take("likeliest", num_tokens, dtype=torch.int64), take("largest", num_tokens)

    def _residual(self, num_tokens: int) -> torch.Tensor:
        """Returns the residual stream where `_compute` left it, whether it ran or was replayed."""
        return self._stream("residual", num_tokens)

    def _stream(self, name: str, num_tokens: int) -> torch.Tensor:
        return self._workspace.take(name, num_tokens, self.hidden_size, dtype=torch.float32)


def _embedded(batch: InputBatch) -> EmbeddedInputs | None:
    if batch.embedded is None or batch.embeddings_ME is None:
        return None
    return EmbeddedInputs(torch.from_numpy(batch.embedded.places_M), batch.embeddings_ME)
