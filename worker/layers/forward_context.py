"""What all layers of one forward pass share: the workspace, the KV cache, attention plans, groups.

It is made once a step and entered with `with`, never nested; layers read it with `current()`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from kernels.attention.plan import AttentionPlan
from kernels.backend import Backend
from worker.layers.kv_cache import KVCache
from worker.model_config import AttentionSpan, ExpertsConfig
from worker.parallel.groups import Group, Groups


class ExpertLoad:
    """Of each layer that has a mixture. Ranks that share experts count the tokens of all of them, each by itself."""

    def __init__(self, config: ExpertsConfig, layers: Iterable[int]) -> None:
        """layers: of this rank's stage."""
        self.num_experts = config.num_experts
        # int64, read by other threads.
        self.tokens_N = {layer: np.zeros(config.num_experts, np.int64) for layer in layers if config.layers[layer]}

    def count(self, layer: int, experts: torch.Tensor) -> None:
        """experts: int64 of any shape, that of a token and a choice in each; -1 where there is none."""
        self.tokens_N[layer] += np.bincount(experts.numpy().ravel() + 1, minlength=self.num_experts + 1)[1:]

    def clear(self) -> None:
        for tokens_N in self.tokens_N.values():
            tokens_N[:] = 0

    def imbalance(self, layer: int) -> float:
        """Tokens of the layer's busiest expert, over the mean. 1: all get as many; also before there are any."""
        tokens_N = self.tokens_N[layer]
        return float(tokens_N.max() / tokens_N.mean()) if tokens_N.any() else 1.0


class Workspace:
    """Buffers by name, all for the same number of rows.

    A buffer stays where it is until more rows are reserved than ever before: `memory` is then another object.
    """

    def __init__(self, backend: Backend) -> None:
        self._device = backend.device
        # Of what linears and attention give. PyTorch's on a CPU put it elsewhere.
        self._dtype = torch.float32 if backend.gpu is None else backend.compute_dtype
        # On a GPU a batch may end in padding, for which attention leaves its result as it was. Whatever that is goes
        # through the layers, and is to be finite.
        self._new = torch.empty if backend.gpu is None else torch.zeros
        self._num_rows = 0
        self._buffers: dict[str, torch.Tensor] = {}
        # What was taken last of each buffer: in most steps as much as in the one before.
        self._taken: dict[str, torch.Tensor] = {}

    @property
    def memory(self) -> object:
        """The same object as long as every buffer stays where it is."""
        return self._buffers

    def reserve(self, num_rows: int) -> None:
        """Makes room for so many rows. All buffers are lost if there was less."""
        if num_rows > self._num_rows:
            # Powers of 2, so that batches that grow row by row do not get new memory each time. On a GPU the most rows
            # that there will be are reserved at once.
            self._num_rows = num_rows if self._device.type == "cuda" else 1 << (num_rows - 1).bit_length()
            self._buffers, self._taken = {}, {}

    def take(self, name: str, num_rows: int, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The first num_rows rows of a buffer, [num_rows, *shape] and contiguous, with whatever was last put there.
        Shape and dtype are the name's; None: as linears and attention give it."""
        taken = self._taken.get(name)
        if taken is not None and len(taken) == num_rows:
            return taken
        assert num_rows <= self._num_rows, "rows are reserved first"
        buffer = self._buffers.get(name)
        if buffer is None:
            buffer = self._new(self._num_rows, *shape, dtype=dtype or self._dtype, device=self._device)
            self._buffers[name] = buffer
        assert buffer.shape[1:] == shape
        assert buffer.dtype is (dtype or self._dtype)
        self._taken[name] = taken = buffer[:num_rows]
        return taken


Attend = Callable[[], torch.Tensor]


def call(attend: Attend) -> torch.Tensor:
    """Without graphs of pieces."""
    return attend()


_NOBODY_ELSE = Groups()


class Pieces(Protocol):
    """Graphs of a forward pass that is cut at its attentions."""

    def run(self, body: Callable[[], object]) -> None:
        """Does what `body` does: by running it, or by replaying what it did when it was captured."""
        ...

    def between_graphs(self, attend: Attend) -> torch.Tensor:
        """Called by `body`, see `ForwardContext.between_graphs`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardContext:
    kv_cache: KVCache
    # int64 [T]: where each token's KV is written.
    slots_T: torch.Tensor
    # For kernels.kv_cache.write: of each of ModelConfig.ropes.
    cos_sin_tables: tuple[torch.Tensor, ...]
    attention_plans: dict[AttentionSpan, AttentionPlan]
    # float32 [T], that queries of some layers are multiplied by; None: no layer's are.
    query_temperature_T: torch.Tensor | None = None
    # For what layers compute on the way, with room for all tokens.
    workspace: Workspace
    # Layers have their attention called by this: graphs of pieces end before it and begin anew after it. What is
    # called reads `current()`, for it is called again in later steps; its result is in the workspace.
    between_graphs: Callable[[Attend], torch.Tensor] = call
    groups: Groups = _NOBODY_ELSE
    # Tokens of the step at each replica of groups.data.
    num_tokens_D: Sequence[int] = ()
    expert_load: ExpertLoad | None = None

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
    """The context of the forward pass that runs now, on this thread."""
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
