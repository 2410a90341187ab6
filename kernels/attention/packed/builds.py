"""The configurations of attention over packed sequences that are compiled ahead of time: the heads of Qwen2-VL and
Qwen2.5-VL, of SigLIP So400m, and of SigLIP base."""

import numpy as np
import torch

from kernels.attention.packed.triton import TritonPackedPlan
from kernels.triton_common.kernel_build import KernelBuild
from kernels.triton_common.recording import bf16, recorded


def shipped() -> list[KernelBuild]:
    return [recorded(f"head-size-{size}", lambda size=size: _attend(size)) for size in (64, 72, 80)]


def _attend(head_size: int) -> None:
    q_THD, k_THD, v_THD = bf16(100, 3, 16, head_size).unbind(1)
    plan = TritonPackedPlan(np.array([0, 64, 100], np.int32), torch.device("meta"))
    plan.attend(q_THD, k_THD, v_THD, 0.1, bf16(100, 16, head_size))
