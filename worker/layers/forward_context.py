"""The state that all layers of one forward pass share: the workspace, the KV cache, attention plans, groups; and the
hidden states that are kept for drafting heads.

A context is made once per step and entered with `with`, never nested; layers read it with `current()`.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np
import torch

from kernels.attention.plan import AttentionPlan
from kernels.attention.recurrent import RecurrentStep
from kernels.backend import Backend
from kernels.elementwise.embedding.torch_cpu import embedding
from kernels.linear import Residual, Stream
from kernels.native.library import NativeKernels
from worker.layers.kv_cache import KVCache
from worker.model_config import AttentionSpan, ExpertsConfig
from worker.parallel.groups import Group, Groups


class ExpertLoad:
    """Tokens per expert, for each layer with a mixture of experts. Every rank counts the tokens of all ranks that share
    its experts."""

    def __init__(self, config: ExpertsConfig, layers: Iterable[int]) -> None:
        """layers: those of this rank's stage."""
        self.num_experts = config.num_experts
        # int64; other threads read it.
        self.tokens_N = {layer: np.zeros(config.num_experts, np.int64) for layer in layers if config.layers[layer]}

    def count(self, layer: int, experts: torch.Tensor) -> None:
        """Adds one token for each entry. experts: int64 of any shape, one expert per token and choice; -1: none."""
        self.tokens_N[layer] += np.bincount(experts.numpy().ravel() + 1, minlength=self.num_experts + 1)[1:]

    def clear(self) -> None:
        for tokens_N in self.tokens_N.values():
            tokens_N[:] = 0

    def imbalance(self, layer: int) -> float:
        """Tokens of the layer's busiest expert, divided by the mean. 1: perfectly even, or no tokens yet."""
        tokens_N = self.tokens_N[layer]
        return float(tokens_N.max() / tokens_N.mean()) if tokens_N.any() else 1.0


class Workspace:
    """Buffers by name, all with the same number of rows.

    A buffer keeps its address until more rows are reserved than ever before; then `memory` is a new object.
    """

    def __init__(self, backend: Backend) -> None:
        self._device = backend.device
        # The dtype of results of linears and attention. (PyTorch's linears on a CPU do not write them here.)
        self._dtype = torch.float32 if backend.gpu is None else backend.compute_dtype
        # On a GPU, a batch may end in padding, for which attention does not write its result. The old contents then
        # pass through the layers, so they must be finite.
        self._new = torch.empty if backend.gpu is None else torch.zeros
        self._num_rows = 0
        self._buffers: dict[str, torch.Tensor] = {}
        # The last view taken of each buffer: most steps take as many rows as the step before.
        self._taken: dict[str, torch.Tensor] = {}

    @property
    def memory(self) -> object:
        """The same object for as long as every buffer keeps its address."""
        return self._buffers

    def reserve(self, num_rows: int) -> None:
        """Makes room for num_rows rows. Drops all buffers if there was less room."""
        if num_rows > self._num_rows:
            # Powers of 2, so that batches that grow row by row do not reallocate each time. On a GPU, the first
            # reservation is for the largest batch.
            self._num_rows = num_rows if self._device.type == "cuda" else 1 << (num_rows - 1).bit_length()
            self._buffers, self._taken = {}, {}

    def take(self, name: str, num_rows: int, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns the first num_rows rows of a buffer, [num_rows, *shape] and contiguous, with their old contents. A
        name always has the same shape and dtype. dtype None: that of results of linears and attention."""
        taken = self._taken.get(name)
        if taken is not None and taken.shape[0] == num_rows:
            return taken
        assert num_rows <= self._num_rows, "reserve() must be called first"
        buffer = self._buffers.get(name)
        if buffer is None:
            buffer = self._new(self._num_rows, *shape, dtype=dtype or self._dtype, device=self._device)
            self._buffers[name] = buffer
        assert buffer.shape[1:] == shape
        assert buffer.dtype is (dtype or self._dtype)
        self._taken[name] = taken = buffer[:num_rows]
        return taken


Take = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetStates:
    """Hidden states of a step's tokens, float32. last_TE: after the last layer, before the last norm. kept: before each
    of the layers that KeptStates names."""

    last_TE: torch.Tensor
    kept: Sequence[torch.Tensor] = ()


class KeptStates:
    """Copies the residual stream before each of `layers`; the number after the last layer's is that of the result."""

    def __init__(self, layers: Collection[int], backend: Backend) -> None:
        self.layers = tuple(sorted(set(layers)))
        self._kernels, self._numbers = backend.native, torch.empty(0, dtype=torch.int64)

    def reserve(self, max_tokens: int) -> None:
        """Call it before a step of up to max_tokens tokens is computed or recorded."""
        if len(self._numbers) < max_tokens:
            self._numbers = torch.arange(max_tokens)

    def keep(self, layer: int, x_TE: Stream, take: Take) -> None:
        """Copies the stream, float32 [T, E], if `layer` is one of the layers. take: of the workspace."""
        if layer not in self.layers:
            return
        if isinstance(x_TE, Residual):
            kept_TE = take(_kept(layer), *x_TE.x_TE.shape, dtype=torch.float32)
            if x_TE.is_pending:
                torch.add(x_TE.x_TE, x_TE.delta_TE, out=kept_TE)
            else:
                kept_TE.copy_(x_TE.x_TE)
            return
        kept_TE = take(_kept(layer), *x_TE.shape, dtype=torch.float32)
        # A gather of all rows in order: a call to a kernel, so that a recorded step copies, too.
        embedding(self._numbers[: len(x_TE)], x_TE, self._kernels, out=kept_TE)

    def of(self, num_tokens: int, hidden_size: int, take: Take) -> Sequence[torch.Tensor]:
        """Returns what the latest step has kept: float32 [T, E] for each of the layers, in ascending order."""
        return [take(_kept(layer), num_tokens, hidden_size, dtype=torch.float32) for layer in self.layers]


def _kept(layer: int) -> str:
    return f"before layer {layer}"


@dataclass(frozen=True, slots=True)
class EmbeddedInputs:
    """Tokens of a step whose embeddings come from elsewhere: token places_M[i] has embeddings_ME[i]."""

    places_M: torch.Tensor  # int64
    embeddings_ME: torch.Tensor

    def put(self, x_TE: torch.Tensor, *, divisor: float) -> None:
        """Replaces the tokens' embeddings. divisor: of the residual stream."""
        x_TE[self.places_M] = self.embeddings_ME.to(x_TE.dtype) / divisor


class WantedRows:
    """The tokens of a step on a CPU whose hidden states are wanted after the last layer, such as the last one of each
    prompt. For all others that layer writes the KV; in steps that want any, it also computes their attention, but no
    more."""

    def __init__(self, places: np.ndarray, count: np.ndarray, kernels: NativeKernels | None) -> None:
        """places: int64, with room for any step's tokens, of which the first count[0] (int64) are wanted. Replays of a
        recorded step read both."""
        self._places, self._count, self._kernels = places, count, kernels

    def __len__(self) -> int:
        return int(self._count[0])

    def go_on(self) -> None:
        """Calls after this one are for the wanted tokens alone."""
        if self._kernels is not None:
            self._kernels.go_on_with(self._count.ctypes.data)

    def of(self, name: str, x_TN: torch.Tensor, take: Take) -> torch.Tensor:
        """Returns a copy of the wanted tokens' rows, float32 [L, N]. name: of its buffer in the workspace."""
        if not len(self):
            return x_TN[:0]
        out_LN = take(name, len(self), x_TN.shape[1], dtype=torch.float32)
        # A gather: a call to a kernel, so that a recorded step gathers, too.
        return embedding(torch.from_numpy(self._places[: len(self)]), x_TN, self._kernels, out=out_LN)


Attend = Callable[[], torch.Tensor]


def call(attend: Attend) -> torch.Tensor:
    """Calls `attend` directly: there are no graphs of pieces."""
    return attend()


_NOBODY_ELSE = Groups()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardContext:
    kv_cache: KVCache
    # int64 [T]: where each token's KV is written.
    slots_T: torch.Tensor
    # int64 [T]: within each token's sequence. None where no layer reads them: they read tables made from them.
    positions_T: torch.Tensor | None = None
    # For kernels.kv_cache.write: one for each of ModelConfig.ropes.
    cos_sin_tables: tuple[torch.Tensor, ...]
    attention_plans: dict[AttentionSpan, AttentionPlan]
    # float32 [T]: factors for the queries of some layers; None: no layer has any.
    query_temperature_T: torch.Tensor | None = None
    # Intermediate results of layers, with room for all tokens.
    workspace: Workspace
    # Calls a layer's attention: graphs of pieces end before it, and the next one begins after it. The callable must
    # read `current()` itself, because later steps call it again; its result is in the workspace.
    between_graphs: Callable[[Attend], torch.Tensor] = call
    groups: Groups = _NOBODY_ELSE
    # Tokens of the step at each replica of groups.data.
    num_tokens_D: Sequence[int] = ()
    expert_load: ExpertLoad | None = None
    # None: nobody needs the states before a layer.
    kept_states: KeptStates | None = None
    # None: no layer carries a state from token to token.
    recurrent_step: RecurrentStep | None = None
    # None: the embeddings of all tokens are the model's.
    embedded: EmbeddedInputs | None = None
    # None: all tokens' hidden states are wanted. Only for models that narrow (Model.narrows).
    wanted: WantedRows | None = None

    def keep_states(self, layer: int, x_TE: Stream) -> None:
        """See KeptStates.keep."""
        if self.kept_states is not None:
            self.kept_states.keep(layer, x_TE, self.workspace.take)

    def count_experts(self, layer: int, experts: torch.Tensor) -> None:
        """See ExpertLoad.count."""
        if self.expert_load is not None:
            self.expert_load.count(layer, experts)

    @property
    def group(self) -> Group:
        """The ranks that compute each layer together."""
        return self.groups.tensor


_current: ContextVar[ForwardContext | None] = ContextVar("forward pass", default=None)


def current() -> ForwardContext:
    """The context of the forward pass that runs on this thread."""
    context = _current.get()
    assert context is not None, "a layer was called outside of a forward pass"
    return context


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Makes `context` the current one within the `with` block."""
    assert _current.get() is None, "forward passes are never nested"
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)
