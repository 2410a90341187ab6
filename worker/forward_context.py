"""What all layers of one forward pass share.

It is made once a step and entered with `with`, never nested; layers read it with `current()`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.paged_attention import AttentionPlan
from worker.expert_load import ExpertLoad
from worker.kv_cache import KVCache
from worker.parallel.group import Group
from worker.parallel.groups import Groups
from worker.reach import Reach
from worker.workspace import Workspace

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
    # For kernels.rope_cache_write: of each of ModelConfig.ropes.
    rope_turns: tuple[torch.Tensor, ...]
    attention_plans: dict[Reach, AttentionPlan]
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
