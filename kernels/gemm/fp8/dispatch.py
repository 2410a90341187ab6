"""y = x W^T + bias of e4m3 matrices on a GPU, with the usual layouts of scales.

Legend: M rows, N outputs, K inputs, G = ceil(K / 128).
"""

from pathlib import Path as FilePath

import torch

from kernels.gemm.fp8.choose import (
    BATCH_INVARIANT_TILE,
    PATHS,
    Choice,
    Path,
    Problem,
    choose_path,
    default_tile,
    device_of,
    obstacle,
)
from kernels.gemm.fp8.scaled_mm import scaled_mm
from kernels.gemm.fp8.triton import triton_gemm
from kernels.gemm.fp8.tuned_files import tuned_tile
from kernels.gemm.quantize.checks import check_device
from kernels.gemm.quantize.reference import GROUP
from kernels.triton_common.tuned_tiles import Tile

_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def fp8_gemm(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    x_scales: torch.Tensor,
    weight_scales: torch.Tensor,
    *,
    bias_N: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    batch_invariant: bool = False,
    path: Path = "auto",
    tile: Tile | None = None,
    tuned_folder: str | FilePath | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns y_MN in out_dtype (bfloat16, float16 or float32), accumulated in float32.

    x_MK, weight_NK: float8_e4m3fn, rows contiguous. Scales, float32, one of these pairs:

        x_scales       weight_scales
        [1] or [M, 1]  [1] or [N, 1]          per tensor or token, and per tensor or channel
        [M, G]         [ceil(N / 128), G]     per group of 128, and per block of 128 x 128

    Scales of groups are best M-major (strides (1, M), as quantize_groups returns them). bias_N: in out_dtype.
    batch_invariant: a row's bits depend on the row alone, whatever M is: one tile, K in one order.
    path: "auto" uses torch's scaled_mm where `fp8_gemm_choice` says so; "triton" and "scaled_mm" force one.
    tile: the Triton kernel's; None: the tuned one (tuned_files.py; tuned_folder comes before its other folders), or a
    default. out: memory for the result, contiguous in the last dim.

    Raises ValueError for shapes, dtypes or strides that differ from the above, a GPU without e4m3 (before sm_89), a
    path that cannot compute the problem, and TunedConfigError for a malformed configuration.
    """
    problem = _checked(x_MK, weight_NK, x_scales, weight_scales, bias_N, out_dtype)
    M, N, K = problem.M, problem.N, problem.K
    if out is not None and (out.shape != (M, N) or out.dtype != out_dtype or out.stride(1) != 1):
        raise ValueError(
            f"out of shape {tuple(out.shape)}, strides {out.stride()} and {out.dtype}: [{M}, {N}] of {out_dtype}, "
            "contiguous in the last dim, is expected"
        )
    device = device_of(x_MK.device)
    if path == "auto":
        chosen = choose_path(problem, device, batch_invariant=batch_invariant).path
    else:
        chosen = _insisted(path, problem, x_MK.device, batch_invariant)
    if chosen == "scaled_mm" and M and N:
        return scaled_mm(
            x_MK, weight_NK, x_scales, weight_scales, bias_N, out_dtype, blockwise=problem.blockwise, out=out
        )
    if out is None:
        out = torch.empty((M, N), dtype=out_dtype, device=x_MK.device)
    if M == 0 or N == 0:
        return out
    if batch_invariant:
        tile = BATCH_INVARIANT_TILE
    elif tile is None:
        # The interpreter has no tuned tiles.
        if device.capability:
            tile = tuned_tile(M, N, K, device.name, blockwise=problem.blockwise, folder=tuned_folder)
        tile = tile or default_tile(M, N, K, device.num_sms)
    triton_gemm(x_MK, weight_NK, x_scales, weight_scales, bias_N, out, blockwise=problem.blockwise, tile=tile)
    return out


def fp8_gemm_choice(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    x_scales: torch.Tensor,
    weight_scales: torch.Tensor,
    *,
    bias_N: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    batch_invariant: bool = False,
) -> Choice:
    """The path of fp8_gemm for these arguments with path="auto", and the reason. Raises ValueError as fp8_gemm does."""
    problem = _checked(x_MK, weight_NK, x_scales, weight_scales, bias_N, out_dtype)
    return choose_path(problem, device_of(x_MK.device), batch_invariant=batch_invariant)


def _insisted(path: Path, problem: Problem, device: torch.device, batch_invariant: bool) -> Path:
    if path not in PATHS:
        raise ValueError(f"path={path!r} is not one of {', '.join(PATHS)}")
    if path == "scaled_mm":
        against = obstacle(problem, device_of(device))
        if batch_invariant:
            against = "batch_invariant needs one tile for every M, and scaled_mm chooses its kernel by M"
        if against is not None:
            raise ValueError(f"path='scaled_mm': {against}; path='triton' takes it")
    return path


def _checked(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    x_scales: torch.Tensor,
    weight_scales: torch.Tensor,
    bias_N: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> Problem:
    for name, matrix in (("x", x_MK), ("weight", weight_NK)):
        if matrix.dim() != 2 or matrix.dtype != torch.float8_e4m3fn or (matrix.stride(1) != 1 and matrix.shape[1] > 1):
            raise ValueError(
                f"{name} of shape {tuple(matrix.shape)}, strides {matrix.stride()} and {matrix.dtype}: has to be a "
                "matrix of float8_e4m3fn whose rows are contiguous, as kernels.gemm.quantize.triton makes them"
            )
    (M, K), (N, weight_K) = x_MK.shape, weight_NK.shape
    if weight_K != K or K == 0:
        raise ValueError(f"x has rows of {K}, weight of {weight_K}: they have to be equal, and above 0")
    if out_dtype not in _OUT_DTYPES:
        raise ValueError(f"out_dtype={out_dtype} is not one of {', '.join(map(str, _OUT_DTYPES))}")
    if bias_N is not None and (bias_N.shape != (N,) or bias_N.dtype != out_dtype or not bias_N.is_contiguous()):
        raise ValueError(f"bias of shape {tuple(bias_N.shape)} and {bias_N.dtype}: has to be [{N}] of {out_dtype}")
    given = [("weight", weight_NK), ("x_scales", x_scales), ("weight_scales", weight_scales)]
    for name, tensor in given if bias_N is None else [*given, ("bias", bias_N)]:
        if tensor.device != x_MK.device:
            raise ValueError(f"{name} is on {tensor.device}, x on {x_MK.device}: they have to be on one device")
    check_device(x_MK.device)
    blockwise = _has_blocks(M, N, K, x_scales, weight_scales)
    return Problem(
        M=M,
        N=N,
        K=K,
        blockwise=blockwise,
        out_dtype=out_dtype,
        has_bias=bias_N is not None,
        scales_are_m_major=not blockwise or (x_scales.stride(0) == 1 and x_scales.stride(1) in (1, M)),
    )


def _has_blocks(M: int, N: int, K: int, x_scales: torch.Tensor, weight_scales: torch.Tensor) -> bool:
    """True if scales are per group and block. Where shapes fit both pairs, the pairs mean the same."""
    groups = -(-K // GROUP)
    blocks = (-(-N // GROUP), groups)
    if x_scales.dtype == weight_scales.dtype == torch.float32:
        if x_scales.shape == (M, groups) and weight_scales.shape == blocks and weight_scales.stride(1) == 1:
            return True
        if x_scales.shape in ((1,), (M, 1)) and weight_scales.shape in ((1,), (N, 1)):
            return False
    raise ValueError(
        f"x_scales of shape {tuple(x_scales.shape)} and {x_scales.dtype} with weight_scales of shape "
        f"{tuple(weight_scales.shape)} and {weight_scales.dtype}: for M={M}, N={N}, K={K} they have to be float32 of "
        f"[1] or [{M}, 1] with [1] or [{N}, 1], or [{M}, {groups}] with {list(blocks)}, its rows contiguous"
    )
