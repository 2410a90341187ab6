"""The formulas of blocks: sums that fuse what is before and after them, and forms that would be computed otherwise than
they read."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kernels.backend import torch_backend
from kernels.elementwise.rms_norm import rms_norm
from tests.fakes.fake_model import fake_config
from worker.layers.forward_context import ForwardContext, WantedRows, Workspace, forward_context
from worker.layers.kv_cache import KVCache
from worker.layers.mlp import GatedMLP
from worker.layers.residual import InputNorm, LayerOutput, OutputNorm, ResidualStream
from worker.weights.reader import AdaptedReader

BACKEND = torch_backend(torch.float32)
CONFIG = fake_config(hidden_size=6, intermediate_size=10)
NORM, OTHER = InputNorm("norm", 1e-6), InputNorm("other", 1e-6)


class Random(AdaptedReader):
    """Random tensors: the same for the same name."""

    def __init__(self) -> None:
        self.shapes = GatedMLP.shapes(CONFIG, "mlp") | {f"{name}.weight": (6,) for name in ("norm", "other", "after")}

    def __call__(self, name: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(len(name))
        return torch.randn(self.shapes[name], generator=generator)

    def weight(self, name: str, outputs: slice | None = None, inputs: slice | None = None) -> torch.Tensor:
        return self(name)

    def packed(self, names: object) -> None:
        return None


@pytest.fixture
def mlp() -> Iterator[GatedMLP]:
    workspace = Workspace(BACKEND)
    workspace.reserve(8)
    context = ForwardContext(
        kv_cache=KVCache(fake_config(), num_blocks=2, block_size=8, backend=BACKEND),
        slots_T=torch.empty(0),
        cos_sin_tables=(),
        attention_plans={},
        workspace=workspace,
    )
    with torch.inference_mode(), forward_context(context):
        yield GatedMLP(CONFIG, "mlp", NORM, Random(), BACKEND)


def _tokens() -> torch.Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(1))


def _mlp(x_TE: torch.Tensor) -> torch.Tensor:
    """The formula in plain PyTorch."""
    read = Random()
    h_TE = rms_norm(x_TE, read("norm.weight"), 1e-6)
    gate, up, down = (read(f"mlp.{name}_proj.weight") for name in ("gate", "up", "down"))
    return (torch.nn.functional.silu(h_TE @ gate.T) * (h_TE @ up.T)) @ down.T


def test_a_sum_is_the_formula_and_lies_where_the_stream_lay(mlp: GatedMLP) -> None:
    values = _tokens()
    x = ResidualStream(values)
    x = x + mlp(NORM(x))
    assert x.values is values
    torch.testing.assert_close(x.values, _tokens() + _mlp(_tokens()))


def test_a_norm_around_a_layer_norms_what_is_added(mlp: GatedMLP) -> None:
    after, x = OutputNorm("after", 1e-6, Random(), BACKEND), ResidualStream(_tokens())
    x = x + after(mlp(NORM(x)))
    assert isinstance(x.values, torch.Tensor)
    expected = _tokens() + rms_norm(_mlp(_tokens()), Random()("after.weight"), 1e-6)
    torch.testing.assert_close(x.values, expected)


def test_a_layer_computes_no_norm_but_the_one_it_was_loaded_with(mlp: GatedMLP) -> None:
    x = ResidualStream(_tokens())
    with pytest.raises(AssertionError, match="another norm"):
        _ = x + mlp(OTHER(x))
    with pytest.raises(AssertionError, match="computes a norm first"):
        _ = x + mlp(x)


def test_a_stream_cannot_be_read_once_something_was_added_to_it(mlp: GatedMLP) -> None:
    """Two layers side by side, as in x + attention(norm(x)) + mlp(norm(x)), would read different streams."""
    x = ResidualStream(_tokens())
    first, second = mlp(NORM(x)), mlp(NORM(x))
    y = x + first
    with pytest.raises(AssertionError, match="something was added"):
        _ = y + second


def test_only_a_layer_that_computes_wanted_tokens_alone_is_added_to_them(mlp: GatedMLP) -> None:
    """Attention of the last layer does; another layer's result would have all tokens."""
    wanted = WantedRows(np.array([0, 2, 0]), np.array([2]), None)
    x = ResidualStream(_tokens(), wanted)
    with pytest.raises(AssertionError, match="computes all tokens"):
        _ = x + mlp(NORM(x))
    ones = LayerOutput(lambda into: into.add_(torch.ones(2, 6)), wanted=wanted)  # type: ignore[union-attr]
    x = x + ones
    assert isinstance(x.values, torch.Tensor)
    torch.testing.assert_close(x.values, _tokens()[[0, 2]] + 1)
    x = x + mlp(NORM(x))
    assert isinstance(x.values, torch.Tensor)
    torch.testing.assert_close(x.values, (_tokens() + 1 + _mlp(_tokens() + 1))[[0, 2]])
