"""Linear layers of e4m3 weights on a GPU. Inputs become e4m3, too: in the kernel that computes them if there is one (a
norm, a gate), else in a separate kernel.

Inputs have a scale per token if weights have scales per tensor or output, and a scale per 128 numbers of a token if
weights have scales per block. No scale depends on other tokens, and none comes from the checkpoint: inputs beyond a
calibrated scale would be cut off.

Legend: T tokens, I inputs, O outputs, E hidden size, X ceil(I / 128).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from kernels.backend import GpuBackend
from kernels.elementwise.rms_norm.triton import rms_norm_quantize_groups, rms_norm_quantize_tokens
from kernels.elementwise.silu_mul.torch_cpu import Activation
from kernels.elementwise.silu_mul.triton import silu_mul, silu_mul_quantize_groups, silu_mul_quantize_tokens
from kernels.gemm.fp8.choose import SCALED_MM_MIN_ROWS, Problem, choose_path, device_of
from kernels.gemm.fp8.dispatch import fp8_gemm
from kernels.gemm.quantize.checks import check_device
from kernels.gemm.quantize.triton import quantize_groups, quantize_tokens
from kernels.linear.residual import Residual
from kernels.linear.weights import BLOCK, Fp8Weight


class Fp8Rows(NamedTuple):
    """Quantized inputs of a layer: float8_e4m3fn values, and float32 scales [T, 1] or [T, X]."""

    values_TI: torch.Tensor
    scales: torch.Tensor


class GpuFp8Linear:
    """PackedLinear on a GPU, for e4m3 weights."""

    __slots__ = (
        "_activation",
        "_bias_O",
        "_by_group",
        "_dtype",
        "_eps",
        "_gated",
        "_invariant",
        "_norm_I",
        "_padded",
        "_scales",
        "_values_OI",
        "num_outputs",
    )

    def __init__(
        self,
        weight: Fp8Weight,
        bias_O: torch.Tensor | None,
        norm_I: torch.Tensor | None,
        eps: float,
        *,
        gated: bool,
        activation: Activation = "silu",
        dtype: torch.dtype,
        gpu: GpuBackend,
    ) -> None:
        """dtype: that of inputs and outputs. Raises ValueError for a GPU without e4m3 (before sm_89)."""
        check_device(gpu.device)
        self._values_OI = weight.values_OI.to(gpu.device).contiguous()
        self._by_group = weight.has_blocks
        scales = weight.scales.to(gpu.device)
        if weight.has_blocks:
            self._scales = _apart(scales)
        else:
            # The GEMM takes [1] for a scale per tensor, [O, 1] for scales per output.
            self._scales = scales[0] if len(scales) == 1 else scales.contiguous()
        self.num_outputs = len(self._values_OI) // 2 if gated else len(self._values_OI)
        self._bias_O = None if bias_O is None else bias_O.to(gpu.device, dtype).contiguous()
        # Followed by zeros up to whole blocks, for steps that scaled_mm computes.
        self._padded: tuple[torch.Tensor, torch.Tensor | None] | None = None
        if not gated and _gains_from_padding(weight, dtype, gpu):
            more = -len(self._values_OI) % BLOCK
            values_OI = F.pad(self._values_OI.view(torch.uint8), (0, 0, 0, more)).view(torch.float8_e4m3fn)
            self._values_OI = values_OI[: len(self._values_OI)]
            self._padded = values_OI, None if self._bias_O is None else F.pad(self._bias_O, (0, more))
        self._norm_I = None if norm_I is None else norm_I.to(gpu.device)
        self._eps, self._gated, self._dtype, self._invariant = eps, gated, dtype, gpu.batch_invariant
        self._activation: Activation = activation

    @property
    def packed(self) -> None:
        """Nothing is packed."""
        return None

    @property
    def num_bytes(self) -> int:
        return (self._padded or (self._values_OI,))[0].nbytes + self._scales.nbytes

    def __call__(self, x: torch.Tensor | Residual, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns [T, O] from [T, I] in the layer's dtype, or from the residual stream if there is a norm."""
        if not self._gated:
            return self._multiplied(self._quantized(x), out)
        return silu_mul(self._multiplied(self._quantized(x), None), activation=self._activation, out=out)

    def add_to_(self, residual: Residual, x_TI: torch.Tensor | Fp8Rows) -> None:
        """Leaves the result pending in the residual stream."""
        assert not residual.is_pending
        rows = x_TI if isinstance(x_TI, Fp8Rows) else self._quantized(x_TI)
        self._multiplied(rows, residual.delta_TE)
        residual.is_pending = True

    def gated_for(self, other: "GpuFp8Linear", x: torch.Tensor | Residual) -> Fp8Rows:
        """Returns a call's result as inputs of `other`, gated and quantized in one kernel."""
        assert self._gated
        gate_up_T2O = self._multiplied(self._quantized(x), None)
        quantize = silu_mul_quantize_groups if other._by_group else silu_mul_quantize_tokens
        return Fp8Rows(*quantize(gate_up_T2O, activation=self._activation))

    def _quantized(self, x: torch.Tensor | Residual) -> Fp8Rows:
        if isinstance(x, torch.Tensor):
            assert self._norm_I is None
            return Fp8Rows(*(quantize_groups(x) if self._by_group else quantize_tokens(x)))
        assert self._norm_I is not None
        normed = rms_norm_quantize_groups if self._by_group else rms_norm_quantize_tokens
        if not x.is_pending:
            return Fp8Rows(*normed(x.x_TE, self._norm_I, self._eps, out_dtype=self._dtype))
        x.is_pending = False
        return Fp8Rows(*normed(x.delta_TE, self._norm_I, self._eps, residual_TN=x.x_TE, out_dtype=self._dtype))

    def _multiplied(self, rows: Fp8Rows, out: torch.Tensor | None) -> torch.Tensor:
        x_TI, scales = rows
        if self._padded is None or len(x_TI) < SCALED_MM_MIN_ROWS:
            return fp8_gemm(
                x_TI,
                self._values_OI,
                scales,
                self._scales,
                bias_N=self._bias_O,
                out_dtype=self._dtype,
                batch_invariant=self._invariant,
                out=out,
            )
        values_OI, bias_O = self._padded
        y_TO = fp8_gemm(x_TI, values_OI, scales, self._scales, bias_N=bias_O, out_dtype=self._dtype)
        y_TO = y_TO[:, : len(self._values_OI)]
        return y_TO.contiguous() if out is None else out.copy_(y_TO)


def _gains_from_padding(weight: Fp8Weight, dtype: torch.dtype, gpu: GpuBackend) -> bool:
    """Returns True if scaled_mm, which is faster at many rows, takes the weight with outputs in whole blocks alone, as
    the 2,112 of DeepSeek-V3's first projections."""
    num_outputs, num_inputs = weight.values_OI.shape
    if not weight.has_blocks or num_outputs % BLOCK == 0:
        return False
    padded = num_outputs + -num_outputs % BLOCK
    problem = Problem(M=1024, N=padded, K=num_inputs, blockwise=True, out_dtype=dtype, has_bias=False)
    return choose_path(problem, device_of(gpu.device), batch_invariant=gpu.batch_invariant).path == "scaled_mm"


def _apart(scales_YX: torch.Tensor) -> torch.Tensor:
    """Returns scales with a row stride that is a multiple of 4, which saves scaled_mm a copy in each call."""
    num_rows, num_groups = scales_YX.shape
    padded = scales_YX.new_zeros(num_rows, -(-num_groups // 4) * 4)
    padded[:, :num_groups] = scales_YX
    return padded[:, :num_groups]
