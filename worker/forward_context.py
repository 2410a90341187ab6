"""What all layers of one forward pass share.

It is made once a step and entered with `with`, never nested; layers read it with `current()`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kernels.paged_attention import AttentionPlan
from worker.kv_cache import KVCache
from worker.workspace import Workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardContext:
    kv_cache: KVCache
    # int64 [T]: where each token's KV is written.
    slots_T: torch.Tensor
    # complex64 [T, 1, head size / 2], for kernels.rope.
    rope_turns: torch.Tensor
    # By sliding window; 0 is for layers without one.
    attention_plans: dict[int, AttentionPlan]
    # For what layers compute on the way, with room for all tokens.
    workspace: Workspace


_current: ForwardContext | None = None


def current() -> ForwardContext:
    """The context of the forward pass that runs now."""
    assert _current is not None, "a layer was called outside of a forward pass"
    return _current


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Makes `context` the current one within the `with` block."""
    global _current
    assert _current is None, "forward passes are never nested"
    _current = context
    try:
        yield
    finally:
        _current = None
