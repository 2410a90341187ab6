"""Checks C++ draws against the reference, at load."""

import numpy as np
import torch

from kernels.native.check import wrong
from kernels.native.library import NativeKernels
from kernels.sampling.native import draw_rows
from kernels.sampling.reference import filtered_cdf_reference


def check(kernels: NativeKernels) -> None:
    """Draws with uniforms in the middle of a token's share of the CDF, so that rounding cannot change the token. Raises
    NativeKernelsError if other tokens come out."""
    logits_LV = np.random.default_rng(0).standard_normal((4, 1003)).astype(np.float32) * 3
    top_k_N, top_p_N, min_p_N = [0, 40, 0, 700], [1.0, 0.8, 0.9, 0.7], [0.0, 0.01, 0.0, 0.0]
    uniforms: list[float] = []
    expected: list[int] = []
    for logits_V, top_k, top_p, min_p in zip(logits_LV, top_k_N, top_p_N, min_p_N, strict=True):
        cdf_V = filtered_cdf_reference(
            torch.from_numpy(logits_V), temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p
        ).numpy()
        steps_V = np.diff(cdf_V, prepend=0.0)
        expected.append(int(steps_V.argmax()))
        uniforms.append(float(cdf_V[expected[-1]] - steps_V[expected[-1]] / 2))
    got = draw_rows(
        logits_LV,
        np.arange(4),
        temperature_N=np.full(4, 0.8),
        uniform_N=np.array(uniforms),
        top_k_N=np.array(top_k_N),
        top_p_N=np.array(top_p_N),
        min_p_N=np.array(min_p_N),
        kernels=kernels,
    )
    if got.tolist() != expected:
        raise wrong(kernels, f"draws give tokens {got.tolist()}, not {expected}")
