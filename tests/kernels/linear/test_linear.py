from functools import partial

import numpy as np
import pytest
import torch

from kernels.backend import Backend, torch_backend
from kernels.elementwise.rms_norm.reference import rms_norm
from kernels.elementwise.silu_mul import Activation
from kernels.elementwise.silu_mul.reference import gelu_tanh_mul, silu_mul
from kernels.linear import PackedLinear
from kernels.linear.native import WeightKind
from kernels.linear.reference import linear
from kernels.sampling import apply_masks, greedy
from tests.support.kernels.kernel_paths import KINDS, NATIVE_KINDS, native, path_of

# Some outputs and inputs fill whole panels, pairs and vectors, others do not.
SHAPES = ((96, 40), (97, 33), (64, 48), (5, 3))


def _weight(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(num_outputs, num_inputs) * num_inputs**-0.5).to(dtype)


def _tolerance(backend: Backend, dtype: torch.dtype) -> float:
    """Sums of 100 float32 products have an error of about 1e-6; rounding inputs to bf16 adds 2^-9 each."""
    rounds = backend.compute_dtype is torch.bfloat16 or (
        backend.native is not None and backend.native.path.rounds_inputs
    )
    return 2e-2 if dtype is torch.bfloat16 and rounds else 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_float64(kind: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """The reference uses the rounded weights, so that bf16 weights add no error."""
    torch.manual_seed(0)
    num_inputs, num_outputs = shape
    path, weight = path_of(kind, dtype), _weight(num_outputs, num_inputs, dtype)
    tolerance = _tolerance(path, dtype)
    for rows in (1, 2, 7, 64, 200):
        x = torch.randn(rows, num_inputs)
        for bias in (None, torch.randn(num_outputs).to(dtype)):
            y = PackedLinear(weight, bias, path)(x)
            assert y.dtype is path.compute_dtype
            torch.testing.assert_close(y.double(), linear(x, weight, bias), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_gates", [45, 16, 3])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_norm_gate_and_addition(kind: str, dtype: torch.dtype, num_gates: int, activation: Activation) -> None:
    torch.manual_seed(0)
    path, x = path_of(kind, dtype), torch.randn(19, 70) * 3
    weight, bias = _weight(2 * num_gates, 70, dtype), torch.randn(2 * num_gates).to(dtype)
    norm, residual = torch.randn(70), torch.randn(19, num_gates)
    multiplied = silu_mul if activation == "silu" else gelu_tanh_mul
    expected = residual + multiplied(linear(rms_norm(x, norm, 1e-2), weight, bias))
    PackedLinear(weight, bias, path, norm_I=norm, eps=1e-2, gated=True, activation=activation).add_to_(residual, x)
    # Norm weights make the sums larger, and a gate multiplies two of them.
    tolerance = 10 * _tolerance(path, dtype)
    torch.testing.assert_close(residual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("num_rows", [1, 7])
def test_fixed_point_keeps_every_bit_of_a_bfloat16_near_the_largest(num_rows: int) -> None:
    """All 128 significands with either sign, at 14 distances from the largest of 64 weights; in panels as one tile
    reads them, and as several do. In each row one input is 1 and the others 0, so that a sum is a single weight."""
    significands = torch.arange(128, 256).repeat(2) * torch.tensor([1, -1]).repeat_interleave(128)
    exponents = torch.arange(14)
    weight_OI = (significands[:, None] * 2.0**-exponents).bfloat16()  # 256 columns, 14 inputs
    largest = torch.full((256, 1), 255.0).bfloat16()
    packed = PackedLinear(torch.cat((largest, weight_OI), dim=1), None, path_of("avx2", torch.bfloat16))
    x_TI = torch.zeros(15 * num_rows, 15)
    x_TI[torch.arange(15 * num_rows), torch.arange(15 * num_rows) % 15] = 1.0
    columns = torch.cat([packed(rows) for rows in x_TI.split(num_rows)])[:15].T[:, 1:]
    # 13 bits below 2^8 hold all 8 bits of a bf16 up to 5 exponents below the largest; smaller ones are rounded to 2^-5.
    exact = exponents <= 5
    torch.testing.assert_close(columns[:, exact], weight_OI.float()[:, exact], rtol=1e-6, atol=0)
    torch.testing.assert_close(columns, weight_OI.float(), rtol=1e-6, atol=2.0**-6 * 1.001)


@pytest.mark.parametrize("kind", ["avx512-bf16", "avx512-vnni"])
@pytest.mark.parametrize("num_inputs", [1, 2, 3, 64, 577])
@pytest.mark.parametrize("gated", [False, True])
def test_weights_in_12_bits_change_no_bit(kind: str, num_inputs: int, gated: bool) -> None:
    """Among usual weights there are zeros, an infinity, and a few much larger or much smaller ones. One panel whose
    weights 12 bits do not hold makes all of a layer whole."""
    torch.manual_seed(0)
    path, num_outputs = path_of(kind, torch.bfloat16), 160
    weight = _weight(num_outputs, num_inputs, torch.bfloat16)
    places = torch.randperm(weight.numel())[: weight.numel() // 500]
    weight.view(-1)[places] = (torch.randn(len(places)) * 2.0 ** torch.randint(-100, 100, (len(places),))).bfloat16()
    weight[31] = 0.0
    weight[0, -1] = torch.inf
    wide = (torch.randn(64, num_inputs) * 2.0 ** torch.randint(-60, 0, (64, num_inputs))).bfloat16()
    if gated:
        rest = torch.cat((weight[:80], wide[:32], weight[80:], wide[32:]))
    else:
        rest = torch.cat((weight, wide))
    short, whole = (PackedLinear(each, None, path, gated=gated) for each in (weight, rest))
    assert short.packed is not None
    assert whole.packed is not None
    assert (short.packed.kind, whole.packed.kind) == (WeightKind.SHORT_BFLOAT16, WeightKind.BFLOAT16)
    x = torch.randn(70, num_inputs)
    for rows in (*range(1, 28), 40, 70):
        got, expected = short(x[:rows]), whole(x[:rows])[:, : short.num_outputs]
        assert torch.equal(got.view(torch.int32), expected.contiguous().view(torch.int32)), rows


def test_weights_in_12_bits_take_three_quarters_of_the_memory() -> None:
    weight = _weight(960, 576, torch.bfloat16)
    packed = PackedLinear(weight, None, path_of("avx512-bf16", torch.bfloat16))
    assert packed.num_bytes < 0.77 * weight.nbytes


@pytest.mark.parametrize("kind", NATIVE_KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_gates", [64, 45])
def test_a_pair_of_layers_has_the_bits_of_both(kind: str, dtype: torch.dtype, num_gates: int) -> None:
    """A path may pass other numbers than floats between the two, depending on rows and width."""
    torch.manual_seed(0)
    path, bias = path_of(kind, dtype), torch.randn(2 * num_gates).to(dtype)
    first = PackedLinear(_weight(2 * num_gates, 70, dtype), bias, path, norm_I=torch.randn(70), eps=1e-2, gated=True)
    last = PackedLinear(_weight(50, num_gates, dtype), torch.randn(50).to(dtype), path)
    x, residual = torch.randn(200, 70), torch.randn(200, 50)
    for rows in (1, 16, 31, 32, 33, 48, 97, 200):
        expected, into = residual[:rows].clone(), residual[:rows].clone()
        last.add_to_(expected, first(x[:rows]))
        first.add_through_(last, x[:rows], partial(torch.full, (rows, num_gates), torch.nan), into=into)
        assert torch.equal(into, expected), rows


@pytest.mark.parametrize("kind", NATIVE_KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gated", [False, True])
def test_a_row_has_the_same_bits_in_every_batch(kind: str, dtype: torch.dtype, gated: bool) -> None:
    """Tiles, panels and blocks of rows change with the number of rows; the order of a sum must not."""
    torch.manual_seed(0)
    x = torch.randn(400, 577)
    path = path_of(kind, dtype)
    packed = PackedLinear(_weight(210, 577, dtype), None, path, norm_I=torch.randn(577), gated=gated)
    whole = packed(x)
    for rows in (*range(1, 40), 64, 97, 200, 399):
        assert torch.equal(packed(x[:rows]), whole[:rows]), rows
        assert torch.equal(packed(x[-rows:]), whole[-rows:]), rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_outputs", [1, 5, 33, 1000])
def test_argmax_is_that_of_the_outputs(kind: str, dtype: torch.dtype, num_outputs: int) -> None:
    """Bit for bit, and the lowest id among equals: storing the outputs or not must not change a greedy row's tokens."""
    torch.manual_seed(0)
    weight = _weight(num_outputs, 70, dtype)
    weight[num_outputs // 2 :] = weight[: num_outputs - num_outputs // 2].clone()  # each output twice
    for bias in (None, torch.randn(num_outputs).to(dtype) * 2):
        packed = PackedLinear(weight, bias, path_of(kind, dtype), norm_I=torch.randn(70), eps=1e-5)
        for rows in (1, 2, 7, 64, 200):
            x = torch.randn(rows, 70)
            ids, values = packed.argmax(x)
            expected_ids, expected = greedy(packed(x).float().numpy())
            assert (ids.dtype, values.dtype) == (torch.int64, torch.float32)
            assert ids.tolist() == expected_ids.tolist()
            assert values.tolist() == expected.tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax_of_rows_that_are_not_finite_or_all_equal(kind: str, dtype: torch.dtype) -> None:
    """A panel's padding would win if every output is negative, and a plain maximum would drop NaN."""
    weight, bias = torch.ones(37, 8).to(dtype), torch.full((37,), -1.0).to(dtype)
    packed = PackedLinear(weight, bias, path_of(kind, dtype))
    x = torch.full((5, 8), -2.0)
    x[1, 3], x[2, 3], x[3, 3], x[4] = float("nan"), float("inf"), float("-inf"), 0.125
    ids, values = packed.argmax(x)
    assert ids.tolist() == [0] * 5
    torch.testing.assert_close(values[[0, 4]], torch.tensor([-17.0, 0.0]))
    # Where inputs share a scale, as they may for bf16 weights, an infinite one can make a sum undefined.
    assert not values[1:4].isfinite().any()
    if dtype is torch.float32:
        assert values[2:4].tolist() == [float("inf"), float("-inf")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_outputs", [1, 33, 1000])
def test_masked_argmax_is_that_of_the_outputs_that_masks_leave(kind: str, dtype: torch.dtype, num_outputs: int) -> None:
    """Rows without a mask are among rows with one; masks leave all, some, one or no output."""
    torch.manual_seed(0)
    random = np.random.default_rng(num_outputs)
    weight = _weight(num_outputs, 70, dtype)
    weight[num_outputs // 2 :] = weight[: num_outputs - num_outputs // 2].clone()  # each output twice
    bias = torch.randn(num_outputs).to(dtype) * 2
    packed = PackedLinear(weight, bias, path_of(kind, dtype), norm_I=torch.randn(70), eps=1e-5)
    for rows in (1, 7, 64):
        x = torch.randn(rows, 70)
        is_kept = random.random((5, 32 * -(-num_outputs // 32))) < np.array([[1.0], [0.5], [0.02], [0.0], [0.0]])
        is_kept[4, num_outputs - 1] = True
        masks_MW = np.packbits(is_kept, axis=1, bitorder="little").view("<i4")
        outputs = packed(x).float().numpy()
        masks, expected = list[np.ndarray | None](), outputs.copy()
        for row, place in enumerate(random.integers(-1, 5, rows).tolist()):
            masks.append(None if place < 0 else masks_MW[place])
            if place >= 0:
                expected[row, ~is_kept[place, :num_outputs]] = -np.inf
        ids, values = packed.masked_argmax(x, masks)
        expected_ids, expected_values = greedy(expected)
        assert (ids.dtype, values.dtype) == (torch.int64, torch.float32)
        assert values.tolist() == expected_values.tolist()
        finite = np.isfinite(expected_values)
        assert ids.numpy()[finite].tolist() == expected_ids[finite].tolist()
        apply_masks(outputs, masks)
        assert np.array_equal(outputs, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_masked_argmax_of_rows_that_are_not_finite(kind: str) -> None:
    """A row fails for what its mask bans, too: it would without the mask."""
    packed = PackedLinear(torch.eye(40), None, path_of(kind, torch.float32))
    mask_W = np.array([0b1000, 0], np.int32)
    x = torch.randn(4, 40)
    x[1, 20], x[2, 3], x[3, 35] = float("nan"), float("inf"), float("nan")
    ids, values = packed.masked_argmax(x, [mask_W, mask_W, mask_W, None])
    assert ids[0] == 3
    torch.testing.assert_close(values[0], x[0, 3])
    assert not values[1:].isfinite().any()
    # An identity times infinity has NaN beside it.
    assert not values[1:].isneginf().any()


def test_argmax_is_the_same_however_columns_are_dealt_to_threads() -> None:
    torch.manual_seed(0)
    kernels = native()
    packed = PackedLinear(_weight(5000, 64, torch.bfloat16).round(decimals=2), None, path_of("native", torch.bfloat16))
    x = torch.randn(130, 64).round()  # many equals
    try:
        results = []
        for threads in (1, 2, 3, 5):
            kernels.set_threads(threads)
            results.append(packed.argmax(x)[0])
    finally:
        kernels.set_threads(torch.get_num_threads())
    assert all(torch.equal(result, results[0]) for result in results)
    assert torch.equal(torch.cat([packed.argmax(row[None])[0] for row in x]), results[0])


def test_threads_change_no_bit() -> None:
    torch.manual_seed(0)
    kernels = native()
    packed = PackedLinear(_weight(960, 576, torch.bfloat16), None, path_of("native", torch.bfloat16))
    x = torch.randn(130, 576)
    try:
        results = []
        for threads in (1, 2, 3, 5):
            kernels.set_threads(threads)
            results.append(packed(x))
    finally:
        kernels.set_threads(torch.get_num_threads())
    assert all(torch.equal(result, results[0]) for result in results)


def test_the_torch_path_follows_dtype_and_machine() -> None:
    assert torch_backend(torch.float32).name == "cpu-onednn-float32"
    with open("/proc/cpuinfo") as cpuinfo:
        flags = set(next(line for line in cpuinfo if line.startswith("flags")).split())
    has_bf16 = bool(flags & {"avx512_bf16", "amx_tile"})
    path = torch_backend(torch.bfloat16)
    assert path.name == "cpu-onednn-" + ("bfloat16" if has_bf16 else "bfloat16-as-float32")
    assert path.compute_dtype is path.kv_cache_dtype is (torch.bfloat16 if has_bf16 else torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_packing_keeps_nothing_of_the_tensor_given(kind: str) -> None:
    """Loading overwrites and drops tensors after packing; a layer that still used them would change."""
    x, weight, bias = torch.randn(3, 32), torch.randn(16, 32), torch.randn(16)
    packed = PackedLinear(weight, bias, path_of(kind, torch.float32))
    before = packed(x)
    weight.zero_()
    if kind != "torch":
        bias.zero_()  # oneDNN reads the bias where it is
    assert torch.equal(packed(x), before)
