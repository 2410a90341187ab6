"""Layers with a state: the C++ kernel agrees with the reference; its bits depend on nothing but the tokens before."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.attention.plan import StepRows
from kernels.attention.recurrent import RecurrentLayer, RecurrentShape, RecurrentStep, RecurrentWeights
from kernels.attention.recurrent.check import check
from kernels.attention.recurrent.reference import recurrent
from kernels.backend import Backend
from kernels.native.library import NativeKernelsError
from tests.support.kernels.kernel_paths import KINDS, native, path_of

MAMBA2 = RecurrentShape(rule="mamba2", num_heads=6, num_groups=2, key_size=7, value_size=13, num_taps=4, norm_size=39)
DELTA = replace(MAMBA2, rule="delta", norm_size=13, num_taps=3)
LENGTH = 45


def make_weights(shape: RecurrentShape, *, has_bias: bool = True) -> RecurrentWeights:
    generator = torch.Generator().manual_seed(1)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    heads = shape.num_heads
    return RecurrentWeights(
        taps_WC=random(shape.num_taps, shape.channels) / 2,
        bias_C=random(shape.channels) if has_bias else None,
        rate_H=-random(heads).exp(),
        step_bias_H=random(heads),
        skip_H=random(heads) if shape.rule == "mamba2" else None,
        norm=random(shape.results),
        eps=1e-5,
        steps=(0.0, float("inf")),
    )


class Sequences:
    """A layer, the states of its sequences in blocks, and garbage in all other blocks."""

    def __init__(self, shape: RecurrentShape, backend: Backend, *, block_size: int = 8, threads: int = 1) -> None:
        self.layer, self.step = RecurrentLayer(shape, make_weights(shape), backend), RecurrentStep(backend)
        self.block_size = block_size
        self.cache = torch.full((40, shape.slot), torch.nan)
        if backend.native is not None:
            backend.native.set_threads(threads)

    def compute(self, rows: list[tuple[torch.Tensor, int, list[int]]]) -> list[torch.Tensor]:
        """rows: inputs of the next tokens, the position of the first, blocks."""
        lengths = [len(x_TF) for x_TF, _, _ in rows]
        tables = np.zeros((len(rows), max(len(blocks) for _, _, blocks in rows)), np.int32)
        for row, (_, _, blocks) in enumerate(rows):
            tables[row, : len(blocks)] = blocks
        step = StepRows(
            np.cumsum([0, *lengths], dtype=np.int32),
            np.array([first + len(x_TF) for x_TF, first, _ in rows], np.int32),
            tables,
            self.block_size,
            torch.float32,
        )
        self.step.update(step)
        x_TF = torch.cat([x_TF for x_TF, _, _ in rows])
        out = self.layer(x_TF, self.cache, self.step, lambda name, *size: torch.full(size, torch.nan))
        return list(out.clone().split(lengths))


def inputs(shape: RecurrentShape, seed: int = 0, length: int = LENGTH) -> torch.Tensor:
    return torch.randn(length, shape.width, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[MAMBA2, DELTA], ids=lambda shape: shape.rule)
def shape(request: pytest.FixtureRequest) -> RecurrentShape:
    return request.param


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_bias", [True, False])
def test_agrees_with_float64(kind: str, shape: RecurrentShape, has_bias: bool) -> None:
    backend, x_TF, weights = path_of(kind, torch.float32), inputs(shape), make_weights(shape, has_bias=has_bias)
    sequences = Sequences(shape, backend)
    sequences.layer = RecurrentLayer(shape, weights, backend)
    (got,) = sequences.compute([(x_TF, 0, [5, 1, 9, 2, 3, 7])])
    rows = StepRows(
        np.array([0, LENGTH], np.int32),
        np.array([LENGTH], np.int32),
        np.array([[5, 1, 9, 2, 3, 7]], np.int32),
        8,
        torch.float32,
    )
    plain = torch.zeros(40, shape.slot, dtype=torch.float64)
    expected = recurrent(shape, weights, x_TF.double(), plain, rows)
    assert (got - expected).abs().max() / expected.abs().max() < 1e-5
    # The state after each full block, and after the last token.
    for block in (5, 1, 9, 2, 3, 7):
        state = sequences.cache[block].nan_to_num()
        assert (state - plain[block]).abs().max() < 1e-4 * plain.abs().max()


@pytest.mark.parametrize("kind", ["native", "torch"])
@pytest.mark.parametrize(
    ("chunks", "block_size", "threads"),
    [([1] * LENGTH, 8, 1), ([20, 25], 8, 3), ([8, 8, 29], 16, 1), ([7, 1, 1, 30, 6], 64, 2)],
)
def test_chunks_blocks_and_neighbours_change_no_bit(
    kind: str, shape: RecurrentShape, chunks: list[int], block_size: int, threads: int
) -> None:
    backend, x_TF, other = path_of(kind, torch.float32), inputs(shape), inputs(shape, seed=5)
    (expected,) = Sequences(shape, backend).compute([(x_TF, 0, [1, 2, 3, 4, 5, 6])])
    sequences = Sequences(shape, backend, block_size=block_size, threads=threads)
    own, others, got, first = [9, 3, 17, 22, 4, 30], [8, 2, 6, 12, 5, 31], [], 0
    for chunk in chunks:
        rows = [(x_TF[first : first + chunk], first, own)]
        if first < 20:
            rows.insert(0, (other[first : first + 1], first, others)) if chunk == 1 else rows.append((other, 0, others))
        got.append(sequences.compute(rows)[[each[2] for each in rows].index(own)])
        first += chunk
    assert torch.equal(torch.cat(got), expected)
    if backend.native is not None:
        backend.native.set_threads(1)


@pytest.mark.parametrize("kind", ["native", "torch"])
def test_a_row_goes_on_from_blocks_that_a_row_before_it_fills_in_the_same_step(
    kind: str, shape: RecurrentShape
) -> None:
    """A prefix may be found in blocks that the step itself fills. Neither changes the blocks they share."""
    backend, x_TF = path_of(kind, torch.float32), inputs(shape)
    (expected,) = Sequences(shape, backend).compute([(x_TF, 0, [1, 2, 3, 4, 5, 6])])
    sequences = Sequences(shape, backend)
    writer, reader = sequences.compute([(x_TF[:20], 0, [1, 2, 3]), (x_TF[16:], 16, [1, 2, 11, 12, 13, 14])])
    assert torch.equal(writer, expected[:20])
    assert torch.equal(reader, expected[16:])
    (rest,) = sequences.compute([(x_TF[20:], 20, [1, 2, 3, 15, 16, 17])])
    assert torch.equal(rest, expected[20:])


@pytest.mark.parametrize("field", ["taps_WC", "rate_H", "step_bias_H", "skip_H", "norm", "eps", "steps"])
def test_the_check_at_load_finds_wrong_numbers(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = native()
    check(kernels)
    wrong = {"eps": lambda old: 1.0, "steps": lambda old: (0.0, 1.0)}.get(
        field, lambda old: None if old is None else old * 1.01
    )
    from kernels.attention.recurrent import native as module

    plain = module.NativeLayer.__init__

    def init(self: object, shape: RecurrentShape, weights: RecurrentWeights, kernels: object) -> None:
        plain(self, shape, weights._replace(**{field: wrong(getattr(weights, field))}), kernels)  # type: ignore[arg-type]

    monkeypatch.setattr(module.NativeLayer, "__init__", init)
    with pytest.raises(NativeKernelsError, match=r"a recurrence \((mamba2|delta)\) is off by"):
        check(kernels)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_heads": 5}, "5 heads must be a multiple of 2 groups"),
        ({"key_size": 513}, "keys have 513 numbers: 1 to 512 work"),
        ({"value_size": 0}, "values have 0 numbers"),
        ({"num_taps": 9}, "reads 9 tokens: 2 to 8 work"),
    ],
)
def test_sizes_that_the_kernel_has_no_room_for_are_refused(changes: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(MAMBA2, **changes)
