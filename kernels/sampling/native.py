"""Draws for many rows: by the C++ kernels, in parallel on their threads (draw.h), or one by one (numpy_cpu.py)."""

import ctypes
from ctypes import c_int64, c_void_p

import numpy as np

from kernels.native.library import NativeKernels
from kernels.sampling.numpy_cpu import draw


class DrawsStruct(ctypes.Structure):
    """`Draws` of kernels/sampling/draw.h."""

    _fields_ = (
        ("logits", c_void_p),
        ("rows", c_void_p),
        ("temperatures", c_void_p),
        ("uniforms", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("vocabulary", c_int64),
        ("count", c_int64),
    )


def draw_rows(
    logits_LV: np.ndarray,
    rows_N: np.ndarray,
    *,
    temperature_N: np.ndarray,
    uniform_N: np.ndarray,
    top_k_N: np.ndarray,
    top_p_N: np.ndarray,
    min_p_N: np.ndarray,
    kernels: NativeKernels | None,
) -> np.ndarray:
    """Returns the tokens of N draws from rows of logits_LV, int64 [N]; -1 for a row with NaN, infinity, or nothing
    finite.

    logits_LV: float32, contiguous. The other arrays are [N]: the rows, and the parameters of `draw`. A token depends
    only on its own row and parameters. C++ and NumPy have different exponentials: where the uniform is within rounding
    of a step of the CDF, their tokens may differ.
    """
    if not len(rows_N):
        return np.empty(0, np.int64)
    if kernels is not None:
        return _native(logits_LV, rows_N, temperature_N, uniform_N, top_k_N, top_p_N, min_p_N, kernels)
    return np.array(
        [
            draw(logits_LV[row], temperature=temperature, uniform=uniform, top_k=top_k, top_p=top_p, min_p=min_p)
            if np.isfinite(logits_LV[row].max())
            else -1
            for row, temperature, uniform, top_k, top_p, min_p in zip(
                *(each.tolist() for each in (rows_N, temperature_N, uniform_N, top_k_N, top_p_N, min_p_N)), strict=True
            )
        ],
        np.int64,
    )


def _native(
    logits_LV: np.ndarray,
    rows_N: np.ndarray,
    temperature_N: np.ndarray,
    uniform_N: np.ndarray,
    top_k_N: np.ndarray,
    top_p_N: np.ndarray,
    min_p_N: np.ndarray,
    kernels: NativeKernels,
) -> np.ndarray:
    assert logits_LV.dtype == np.float32
    assert logits_LV.flags.c_contiguous
    arrays = [
        np.ascontiguousarray(rows_N, np.int64),
        np.ascontiguousarray(temperature_N, np.float32),
        np.ascontiguousarray(uniform_N, np.float64),
        np.ascontiguousarray(top_k_N, np.int64),
        np.ascontiguousarray(top_p_N, np.float64),
        np.ascontiguousarray(min_p_N, np.float32),
    ]
    assert all(array.shape == rows_N.shape for array in arrays)
    struct = DrawsStruct(
        logits_LV.ctypes.data,
        *(array.ctypes.data for array in arrays),
        vocabulary=logits_LV.shape[1],
        count=len(rows_N),
    )
    tokens_N = np.empty(len(rows_N), np.int64)
    kernels.draw(ctypes.addressof(struct), tokens_N.ctypes.data)
    return tokens_N
