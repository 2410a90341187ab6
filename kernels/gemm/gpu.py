"""y = x W^T + bias on a GPU, of bf16, fp16 or float32.

Legend: M rows, N outputs, K inputs.
"""

import torch

from kernels.gemm.invariant import invariant_gemm, should_split, tile_for

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def gemm(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    *,
    bias_N: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """y_MN of out_dtype, rounded once from what was added up in float32.

    x_MK: bfloat16, float16 or float32, rows contiguous and any stride apart. weight_NK: of x's dtype, rows contiguous.
    bias_N: of x's dtype. out_dtype: one of the three; None is x's. out: memory for the result, rows contiguous.

    batch_invariant: a row's bits depend on the row alone, whatever M is and wherever in the batch it lies: the Triton
    kernel of kernels/gemm/invariant.py, in which float32 is not rounded to tf32. Otherwise torch computes, with cuBLAS,
    which chooses its kernel by M and adds as torch.backends.cuda.matmul allows; but where out_dtype is not x's, which
    torch does not have everywhere, the Triton kernel does.

    Raises ValueError for shapes, dtypes or strides that are not as above.
    """
    out_dtype = out_dtype or x_MK.dtype
    _check(x_MK, weight_NK, bias_N, out_dtype)
    M, N = len(x_MK), len(weight_NK)
    if out is not None and (out.shape != (M, N) or out.dtype is not out_dtype or (out.stride(1) != 1 and N > 1)):
        raise ValueError(
            f"out of shape {tuple(out.shape)}, strides {out.stride()} and {out.dtype}: ({M}, {N}) of {out_dtype}, its "
            "rows contiguous, is expected"
        )
    if not batch_invariant and out_dtype is x_MK.dtype:
        if bias_N is None:
            return torch.mm(x_MK, weight_NK.t(), out=out)
        return torch.addmm(bias_N, x_MK, weight_NK.t(), out=out)
    if out is None:
        out = torch.empty((M, N), dtype=out_dtype, device=x_MK.device)
    if M and N:
        tile = tile_for(M, x_MK.dtype)
        invariant_gemm(x_MK, weight_NK, bias_N, out, tile=tile, split=should_split(M, N, tile))
    return out


def _check(x_MK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, out_dtype: torch.dtype) -> None:
    dtypes = ", ".join(map(str, _DTYPES))
    if x_MK.dtype not in _DTYPES or out_dtype not in _DTYPES:
        raise ValueError(f"x of {x_MK.dtype} and out_dtype={out_dtype}: both have to be of {dtypes}")
    for name, matrix in (("x", x_MK), ("weight", weight_NK)):
        if matrix.dim() != 2 or matrix.dtype is not x_MK.dtype or (matrix.stride(1) != 1 and matrix.shape[1] > 1):
            raise ValueError(
                f"{name} of shape {tuple(matrix.shape)}, strides {matrix.stride()} and {matrix.dtype}: has to be a "
                f"matrix of {x_MK.dtype}, as x is, whose rows are contiguous"
            )
    if x_MK.shape[1] != weight_NK.shape[1] or not x_MK.shape[1]:
        raise ValueError(
            f"x has rows of {x_MK.shape[1]}, weight of {weight_NK.shape[1]}: they have to be equal, and above 0"
        )
    N = len(weight_NK)
    if bias_N is not None and (bias_N.shape != (N,) or bias_N.dtype is not x_MK.dtype or not bias_N.is_contiguous()):
        raise ValueError(f"bias of shape {tuple(bias_N.shape)} and {bias_N.dtype}: has to be [{N}] of {x_MK.dtype}")
