"""Gated activations in PyTorch."""

from typing import Literal

import torch
import torch.nn.functional as F

from kernels.native.library import NativeKernels

# gelu in its tanh form (arXiv 1606.08415). clamped_swiglu is gpt-oss's (arXiv 2508.10925): (up + 1) * gate *
# sigmoid(1.702 * gate), with gate at most 7 and up within [-7, 7].
Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0


def silu_mul(gate_up: torch.Tensor, *, activation: Activation = "silu") -> torch.Tensor:
    """Returns [T, N] in the input's dtype from [T, 2N], whose first half is the gate; computed in float32. activation:
    the gate's."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        return (torch.sigmoid(SWIGLU_ALPHA * gate).mul_(gate) * (up + 1)).to(gate_up.dtype)
    activated = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return activated.mul_(up).to(gate_up.dtype)


def multiply_by_sigmoid_(x: torch.Tensor, gates: torch.Tensor, kernels: NativeKernels | None) -> None:
    """Multiplies x by the sigmoid of gates, in place; contiguous, of one dtype, float32 for C++. kernels: None: PyTorch
    computes."""
    assert x.shape == gates.shape
    if kernels is None:
        # A softmax with 0: torch.sigmoid rounds differently where a tensor's last numbers don't fill a vector.
        x *= torch.stack((gates.float(), torch.zeros_like(gates.float())), dim=-1).softmax(dim=-1)[..., 0].to(x.dtype)
        return
    assert x.dtype is gates.dtype is torch.float32
    assert x.is_contiguous()
    assert gates.is_contiguous()
    kernels.multiply_by_sigmoid(gates.data_ptr(), x.numel(), x.data_ptr())
