"""Token embeddings on a CPU, by C++ (embedding.h beside this file) or PyTorch."""

import torch

from kernels.native.library import NativeKernels


def embedding(
    ids_T: torch.Tensor,
    table_VN: torch.Tensor,
    kernels: NativeKernels | None,
    *,
    out: torch.Tensor,
    scale: float = 1.0,
) -> torch.Tensor:
    """Sets row t of `out` to table_VN[ids_T[t]] * scale, and returns `out`: float32 [T, N], contiguous.

    ids_T: int64, each within the vocabulary (not checked). table_VN: float32 or bfloat16, contiguous. kernels: the C++
    kernels; None: PyTorch computes.
    """
    if kernels is None:
        out.copy_(table_VN[ids_T])
        return out if scale == 1.0 else out.mul_(scale)
    assert ids_T.dtype is torch.int64
    assert table_VN.dtype in (torch.float32, torch.bfloat16)
    assert table_VN.is_contiguous()
    assert out.dtype is torch.float32
    assert out.shape == (len(ids_T), table_VN.shape[1])
    assert out.is_contiguous()
    is_bf16 = table_VN.dtype is torch.bfloat16
    kernels.embedding(
        ids_T.data_ptr(), len(ids_T), table_VN.data_ptr(), table_VN.shape[1], scale, out.data_ptr(), is_bf16=is_bf16
    )
    return out
