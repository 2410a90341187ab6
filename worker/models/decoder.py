"""What decoder models share: embeddings, layers, a head; recorded and replayed on a CPU.

Legend: T tokens of the step, S tokens whose logits are wanted, E hidden size, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from operator import is_
from typing import Protocol, overload

import torch

from kernels.backend import Backend
from kernels.linear import PackedLinear, Residual, Stream
from kernels.native.library import Recording
from worker.layers.attention import QueryTemperature
from worker.layers.attention_plans import CpuAttentionPlans, GpuAttentionPlans
from worker.layers.embedding import Embedding
from worker.layers.forward_context import ExpertLoad, ForwardContext, Pieces, Workspace, call, forward_context
from worker.layers.kv_cache import KVCache
from worker.layers.linear import load_head
from worker.layers.rotary import Rotary
from worker.model_config import ModelConfig
from worker.parallel.groups import Group, Groups
from worker.step.batch import GpuBatch, InputBatch
from worker.weights.reader import Shape, WeightReader

_EMBEDDING, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class Replay:
    """Records the kernel calls of one step, and makes them again in the following ones.

    With PyTorch's kernels there is nothing to record, and Python makes each call in each step; so it does if steps
    differ in more than their numbers.
    """

    def __init__(self, path: Backend, *, records: bool = True) -> None:
        self._kernels = path.native if records else None
        self._memory: tuple[object, ...] = ()
        self._recording: Recording | None = None

    def run(self, body: Callable[[], object], num_tokens: int, *, memory: tuple[object, ...]) -> None:
        """body: makes the same kernel calls for any number of tokens, and does nothing else; what it passes to them has
        the same addresses as long as `memory` holds the same objects."""
        if self._kernels is not None and self._recording is not None and all(map(is_, memory, self._memory)):
            self._kernels.replay(self._recording, num_tokens)
            return
        # Not around whole steps: entering and leaving it takes 50 us when the weights have just emptied the caches.
        with torch.inference_mode():
            if self._kernels is None:
                body()
                return
            with self._kernels.recording() as recording:
                body()
        self._recording, self._memory = recording, memory


class Layer(Protocol):
    @property
    def weight_bytes(self) -> int: ...

    def add_to_(self, x_TE: Stream) -> None:
        """Adds what the layer computes to the residual stream, in place. Called within a ForwardContext."""
        ...


class Block:
    """Attention, then MLP, each of its own norm, added to the residual stream."""

    def __init__(self, attention: Layer, mlp: Layer) -> None:
        self._attention, self._mlp = attention, mlp

    @property
    def weight_bytes(self) -> int:
        return self._attention.weight_bytes + self._mlp.weight_bytes

    def add_to_(self, x_TE: Stream) -> None:
        self._attention.add_to_(x_TE)
        self._mlp.add_to_(x_TE)


class Decoder(ABC):
    """The residual stream is float32 whatever the weights are: adding to it in place costs no more, and rounds less."""

    def __init__(self, config: ModelConfig, take: WeightReader, path: Backend) -> None:
        """Raises ValueError, before anything is read, for a model that the path's ranks or stages do not divide."""
        layers = path.stage.layers(config.num_layers)
        self.config, self.path = config, path
        self._embed = Embedding(take(_EMBEDDING), path, scale=config.embedding_scale) if path.stage.is_first else None
        self._rotary = Rotary(config.ropes, config.rope_size, path)
        self._layers = [self.block(config, layer, take, path) for layer in layers]
        # Of the last stage, with the norm before it.
        self._head = self._load_head(config, take, path) if path.stage.is_last else None
        self._query_temperature = QueryTemperature(config, path)
        self._workspace = Workspace(path)
        # Set anew in each epoch, once its ranks are connected.
        self.groups = Groups()
        # On a CPU.
        self.expert_load: ExpertLoad | None = None
        if config.experts is not None and path.gpu is None:
            self.expert_load = ExpertLoad(config.experts, path.stage.layers(config.num_layers))
        # On a CPU each expert computes the tokens that chose it; PyTorch computes some norms;
        # and ranks talk to each other within a step.
        is_recordable = config.experts is None and config.latent is None and not config.projection_norm
        records = is_recordable and path.shard.size == 1
        self._forward, self._greedy = (Replay(path, records=records) for _ in range(2))
        self._cpu_plans = CpuAttentionPlans(config, path)
        self._gpu_plans: GpuAttentionPlans | None = None

    @classmethod
    @abstractmethod
    def block(cls, config: ModelConfig, layer: int, take: WeightReader, path: Backend) -> Layer:
        """One layer of the model."""

    @classmethod
    @abstractmethod
    def block_shapes(cls, config: ModelConfig, layer: int) -> dict[str, Shape]:
        """The tensors that `block` reads, by their Hugging Face names."""

    @classmethod
    def tensor_shapes(cls, config: ModelConfig) -> dict[str, Shape]:
        """The tensors of a checkpoint, by their Hugging Face names."""
        shapes: dict[str, Shape] = {_EMBEDDING: (config.vocab_size, config.hidden_size), _NORM: (config.hidden_size,)}
        if not config.tie_word_embeddings:
            shapes[_HEAD] = (config.vocab_size, config.hidden_size)
        for layer in range(config.num_layers):
            shapes |= cls.block_shapes(config, layer)
        return shapes

    @staticmethod
    def _load_head(config: ModelConfig, take: WeightReader, path: Backend) -> PackedLinear:
        return load_head(
            take,
            _EMBEDDING if config.tie_word_embeddings else _HEAD,
            path=path,
            norm=_NORM,
            eps=config.rms_norm_eps,
            outputs=path.shard.covering(config.vocab_size, "vocab_size") if path.shard.size > 1 else None,
        )

    @property
    def group(self) -> Group:
        """The ranks that compute each layer together."""
        return self.groups.tensor

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def head(self) -> PackedLinear:
        """The output head, with the norm before it."""
        assert self._head is not None, "the last stage has it"
        return self._head

    @property
    def weight_bytes(self) -> int:
        ends = sum(each.num_bytes for each in (self._embed, self._head) if each is not None)
        return ends + sum(layer.weight_bytes for layer in self._layers)

    def incoming(self, num_tokens: int) -> torch.Tensor:
        """On a CPU: where a step of a stage that is not the first finds what `forward` gave the stage before, float32
        [T, E]; to be written before the step."""
        self._workspace.reserve(num_tokens)
        return self._residual(num_tokens)

    def reserve(self, *, max_tokens: int, max_rows: int, max_context: int) -> None:
        """On a GPU, before all steps: takes the memory of steps of so many tokens and rows, each after a context of so
        many tokens at most. It stays where it is until more is reserved."""
        self._workspace.reserve(max_tokens)
        self._gpu_plans = GpuAttentionPlans(self.config, self.path, max_num_seqs=max_rows, max_context_len=max_context)

    @overload
    def forward(self, batch: InputBatch, kv_cache: KVCache) -> torch.Tensor: ...
    @overload
    def forward(self, batch: GpuBatch, kv_cache: KVCache, pieces: Pieces | None = None) -> Residual: ...
    def forward(self, batch: InputBatch | GpuBatch, kv_cache: KVCache, pieces: Pieces | None = None) -> Stream:
        """Computes the batch's tokens, writes their KV, gives the residual stream after the last layer, [T, E], in
        memory that the next call uses again. pieces: graphs of what lies between attentions, on a GPU."""
        if isinstance(batch, GpuBatch):
            return self._forward_on_gpu(batch, kv_cache, pieces)
        self._run(self._forward, self._compute, batch, kv_cache)
        return self._stream(batch.num_tokens)

    def logits(self, hidden_SE: Stream, out: torch.Tensor | None = None) -> torch.Tensor:
        """[S, V] from rows of `forward`'s result, float32 or, on a GPU, of the compute dtype; the final norm is applied
        here, to these rows alone. out: memory for the result, on a GPU."""
        if not len(hidden_SE):
            return torch.empty(0, self.config.vocab_size, device=self.path.device)
        if self.group.size == 1:
            logits_SV = self.head(hidden_SE, out)
        else:
            logits_SV = self._gathered(self.head(hidden_SE))
            logits_SV = logits_SV if out is None else out.copy_(logits_SV)
        return logits_SV if self.path.gpu is not None else logits_SV.float()

    def write_part_of_logits(self, hidden_SE: Residual, out_SP: torch.Tensor) -> None:
        """On a GPU: what this rank computes of them, the first columns of `out`."""
        self.head(hidden_SE, out_SP[:, : self.head.num_outputs])

    def gather_logits(self, part_SP: torch.Tensor, out_SV: torch.Tensor) -> None:
        """[S, V] of the parts that all ranks have written, all as wide."""
        parts_RSP = self.group.gather(part_SP)
        width, vocab_size = part_SP.shape[1], self.config.vocab_size
        for first, part in zip(range(0, vocab_size, width), parts_RSP, strict=True):
            out_SV[:, first : first + width].copy_(part[:, : vocab_size - first])

    def likeliest(self, part_SP: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest token of the whole vocabulary (int64 [S]) and its logit (float32 [S]), from the part of it that
        each rank has written; see kernels.sampling.triton.greedy."""
        from kernels.sampling.triton import greedy  # imports Triton

        ids_S, largest_S = greedy(part_SP[:, : self.head.num_outputs])
        return self._of_all_ranks(ids_S.long(), largest_S)

    def greedy(self, batch: InputBatch, kv_cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
        """On a CPU: computes the batch as `forward` does. Gives the likeliest token after each of its logit_indices
        (int64 [S]) and its logit (float32 [S]), see kernels.sampling.greedy, of logits that are not kept; in memory
        that the next call uses again."""
        if batch.num_logits != batch.num_tokens:
            return self._of_all_ranks(*self.head.argmax(self.forward(batch, kv_cache)[batch.logit_indices]))
        # As in each step that only decodes: then the head goes with the layers.
        self._run(self._greedy, self._compute_greedily, batch, kv_cache)
        return self._of_all_ranks(*self._likeliest(batch.num_tokens))

    @property
    def _part_of_vocabulary(self) -> int:
        """Tokens of a rank; the last one may have fewer."""
        return -(-self.config.vocab_size // self.group.size)

    def _gathered(self, logits_SP: torch.Tensor) -> torch.Tensor:
        """[S, V] from each rank's part of the vocabulary."""
        missing = self._part_of_vocabulary - logits_SP.shape[1]
        if missing:
            logits_SP = torch.nn.functional.pad(logits_SP, (0, missing))
        return self.group.gather(logits_SP).transpose(0, 1).flatten(1)[:, : self.config.vocab_size].contiguous()

    def _of_all_ranks(self, ids_S: torch.Tensor, largest_S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest of the vocabulary from the likeliest of each rank's part of it, the lowest among equals."""
        group = self.group
        if group.size == 1:
            return ids_S, largest_S
        first_id = group.rank * self._part_of_vocabulary
        # A logit travels as its bits.
        both_2S = torch.stack((ids_S + first_id, largest_S.view(torch.int32).long()))
        ids_RS, bits_RS = group.gather(both_2S).unbind(1)
        largest_RS = bits_RS.int().view(torch.float32)
        # The first rank of equals; a NaN before all numbers.
        best_1S = largest_RS.argmax(0, keepdim=True)
        return ids_RS.gather(0, best_1S)[0], largest_RS.gather(0, best_1S)[0]

    def _run(
        self, replay: Replay, body: Callable[[InputBatch, KVCache], object], batch: InputBatch, kv_cache: KVCache
    ) -> None:
        self._workspace.reserve(batch.num_tokens)
        memory = batch, kv_cache, self._workspace.memory
        replay.run(lambda: body(batch, kv_cache), batch.num_tokens, memory=memory)

    def _compute(self, batch: InputBatch, kv_cache: KVCache) -> Stream:
        context = ForwardContext(
            kv_cache=kv_cache,
            slots_T=batch.slots_T,
            rope_turns=self._rotary(batch.positions_T, self._workspace),
            query_temperature_T=self._query_temperature(batch.positions_T, self._workspace),
            attention_plans=self._cpu_plans(batch, kv_cache) if batch.num_tokens else {},
            workspace=self._workspace,
            groups=self.groups,
            num_tokens_D=batch.num_tokens_D or (batch.num_tokens,),
            expert_load=self.expert_load,
        )
        with forward_context(context):
            return self._compute_layers(batch.token_ids_T)

    def _compute_greedily(self, batch: InputBatch, kv_cache: KVCache) -> None:
        self.head.argmax(self._compute(batch, kv_cache), out=self._likeliest(batch.num_tokens))

    def _likeliest(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        take = self._workspace.take
        return take("likeliest", num_tokens, dtype=torch.int64), take("largest", num_tokens)

    def _forward_on_gpu(self, batch: GpuBatch, kv_cache: KVCache, pieces: Pieces | None) -> Stream:
        assert self._gpu_plans is not None, "memory is reserved first"
        with torch.inference_mode():
            context = ForwardContext(
                kv_cache=kv_cache,
                slots_T=batch.slots_T,
                rope_turns=self._rotary(batch.positions_T, self._workspace),
                query_temperature_T=self._query_temperature(batch.positions_T, self._workspace),
                attention_plans=self._gpu_plans(batch),
                workspace=self._workspace,
                between_graphs=call if pieces is None else pieces.between_graphs,
                groups=self.groups,
            )
            with forward_context(context):
                if pieces is None:
                    self._compute_layers(batch.token_ids_T)
                else:
                    pieces.run(lambda: self._compute_layers(batch.token_ids_T))
            return self._stream(batch.num_tokens)

    def _compute_layers(self, token_ids_T: torch.Tensor) -> Stream:
        if self._embed is None:
            x_TE = self._stream(len(token_ids_T))
        else:
            x_TE = self._embed(token_ids_T, self._workspace)
            if self.group.size > 1:
                self.group.sum_(x_TE.x_TE if isinstance(x_TE, Residual) else x_TE)
        for layer in self._layers:
            layer.add_to_(x_TE)
        return x_TE

    def _stream(self, num_tokens: int) -> Stream:
        """After the last layer, where `_compute_layers` left it, whether it ran or was replayed."""
        x_TE = self._residual(num_tokens)
        if self.path.gpu is None:
            return x_TE
        return Residual(x_TE, self._workspace.take("delta", num_tokens, self.config.hidden_size), is_pending=True)

    def _residual(self, num_tokens: int) -> torch.Tensor:
        return self._workspace.take("residual", num_tokens, self.config.hidden_size, dtype=torch.float32)
