"""Chooses the backend of this CPU: C++ kernels if they build, load and agree with the references; else PyTorch.

A compiler, a virtual machine or a CPU can be wrong, and wrong logits look like logits. The check takes a few
milliseconds, once a process.
"""

import logging
from functools import lru_cache

import numpy as np
import torch

from kernels.attention.latent import MlaPlanner
from kernels.attention.latent import reference as mla_reference
from kernels.attention.paged import AttentionPlanner
from kernels.attention.paged import reference as attention_reference
from kernels.attention.plan import StepRows
from kernels.backend import Backend, native_backend, torch_backend
from kernels.elementwise.rms_norm import add_rms_norm_
from kernels.elementwise.rms_norm.reference import rms_norm
from kernels.elementwise.rope import cos_sin_table
from kernels.elementwise.silu_mul import Activation
from kernels.elementwise.silu_mul.reference import gelu_tanh_mul, silu_mul
from kernels.kv_cache.layout import HeadShape, LatentShape
from kernels.kv_cache.write import RopeCacheWrite
from kernels.kv_cache.write.reference import rope_cache_write
from kernels.linear import PackedLinear
from kernels.linear.reference import linear, quantized_linear
from kernels.linear.weights import Int4Weight, Int8Weight, num_groups
from kernels.native.build import BuildError, build, path_of_this_cpu
from kernels.native.library import NativeKernels, NativeKernelsError
from kernels.sampling import draw_rows
from kernels.sampling.reference import filtered_cdf_reference

_BLOCK_SIZE = 8
_HEADS = HeadShape(num_heads=6, num_kv_heads=2, head_size=16)
_EPS = 1e-5


def check_kernels(kernels: NativeKernels) -> None:
    """Raises NativeKernelsError, naming op, dtype and error."""
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16):
            # bfloat16 has 8 bits: where inputs or KV are rounded to it, errors of 2^-8 add up like random steps.
            _check_linear(kernels, dtype, generator, 2e-2 if _rounds(kernels, dtype) else 1e-4)
            _check_attention(kernels, dtype, generator, 1e-4 if dtype is torch.float32 else 2e-2)
            _check_mla(kernels, dtype, generator)
        _check_quantized(kernels, generator)
        _check_add_rms_norm(kernels, generator)
    _check_draws(kernels)


def _rounds(kernels: NativeKernels, dtype: torch.dtype) -> bool:
    return dtype is torch.bfloat16 and kernels.path.rounds_inputs


def _check_linear(kernels: NativeKernels, dtype: torch.dtype, generator: torch.Generator, tolerance: float) -> None:
    num_inputs, num_gates = 70, 45
    x = torch.randn(19, num_inputs, generator=generator)
    weight = (torch.randn(2 * num_gates, num_inputs, generator=generator) * num_inputs**-0.5).to(dtype)
    bias, norm = torch.randn(2 * num_gates, generator=generator), torch.randn(num_inputs, generator=generator)
    path = native_backend(dtype, kernels)
    gate_up = linear(rms_norm(x, norm, _EPS), weight, bias)
    expected_of: dict[Activation, torch.Tensor] = {"silu": silu_mul(gate_up), "gelu_tanh": gelu_tanh_mul(gate_up)}
    for activation, expected in expected_of.items():
        got = PackedLinear(weight, bias, path, norm_I=norm, eps=_EPS, gated=True, activation=activation)(x)
        _compare(kernels, f"linear of {dtype}, gated by {activation}", got, expected, tolerance)
    added = torch.randn(19, 2 * num_gates, generator=generator)
    expected = added + linear(x, weight, None)
    plain = PackedLinear(weight, None, path)
    plain.add_to_(added, x)
    _compare(kernels, f"linear of {dtype}", added, expected, tolerance)
    ids, values = plain.argmax(x)
    largest = plain(x).max(dim=-1)
    _compare(kernels, f"argmax of a linear of {dtype}", values, largest.values.double(), 1e-6)
    if not torch.equal(ids, largest.indices):
        raise _wrong(kernels, f"argmax of a linear of {dtype} names another column")


def _check_quantized(kernels: NativeKernels, generator: torch.Generator) -> None:
    num_inputs, num_outputs = 70, 45
    shape, groups = (num_outputs, num_inputs), (num_outputs, num_groups(num_inputs))
    int8 = torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)
    int4 = torch.randint(16, shape, generator=generator, dtype=torch.uint8)
    scales, minima = torch.rand(groups, generator=generator), torch.randn(groups, generator=generator)
    weights: dict[str, Int8Weight | Int4Weight] = {
        "int8": Int8Weight(values_OI=int8, scales_OG=scales[:, :1].contiguous()),
        "grouped int8": Int8Weight(values_OI=int8, scales_OG=scales.half()),
        "int4": Int4Weight(values_OI=int4, scales_OG=scales.half(), minima_OG=minima.half()),
    }
    x, path = torch.randn(7, num_inputs, generator=generator), native_backend(torch.float32, kernels)
    for name, weight in weights.items():
        got = PackedLinear(weight, None, path)(x)
        _compare(kernels, f"linear of {name}", got, quantized_linear(x, weight, None), 1e-5)


def _check_add_rms_norm(kernels: NativeKernels, generator: torch.Generator) -> None:
    x, added, weight = (torch.randn(shape, generator=generator) for shape in ((19, 70), (19, 70), (70,)))
    expected = added + rms_norm(x, weight, _EPS)
    add_rms_norm_(added, x, weight, _EPS, kernels)
    _compare(kernels, "norm added to something", added, expected, 1e-5)


def _check_attention(kernels: NativeKernels, dtype: torch.dtype, generator: torch.Generator, tolerance: float) -> None:
    """A decode after 21 tokens, and 6 queries after 64, all of whose KV went through rope into the cache."""
    path, heads = native_backend(dtype, kernels), _HEADS
    write = RopeCacheWrite(path, num_heads=heads.num_heads, num_kv_heads=heads.num_kv_heads, head_size=heads.head_size)
    tables = np.arange(1, 19, dtype=np.int32).reshape(2, 9)
    shape = (19, _BLOCK_SIZE, 2, heads.num_kv_heads, heads.head_size)
    cache, plain = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=torch.float64)
    for positions in ((range(21), range(64)), (range(21, 22), range(64, 70))):
        flat = torch.tensor([*positions[0], *positions[1]])
        slots = torch.tensor(
            [tables[row, p // _BLOCK_SIZE] * _BLOCK_SIZE + p % _BLOCK_SIZE for row in (0, 1) for p in positions[row]],
            dtype=torch.int64,
        )
        qkv = torch.randn(len(flat), (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_size, generator=generator)
        cos_sin = cos_sin_table(flat, 1.0 / 100.0 ** (torch.arange(heads.head_size // 2) / 8), 1.0)
        q, k, v = rope_cache_write(qkv, cos_sin, heads.num_heads, heads.num_kv_heads, heads.head_size, None, _EPS)
        plain[slots // _BLOCK_SIZE, slots % _BLOCK_SIZE] = torch.stack((k, v), dim=1)
        got_q = write(qkv, cos_sin, cache, slots)
    # The first step's attention is left out: the reference goes token by token, and a second would be a long start.
    step = {
        "query_starts": np.array([0, len(positions[0]), len(flat)], dtype=np.int32),
        "context_lens": np.array([rows[-1] + 1 for rows in positions], dtype=np.int32),
        "block_tables": tables,
    }
    expected = attention_reference.paged_attention(q, plain, **step, scale=0.25)
    plan = AttentionPlanner(path, heads).plan(StepRows(**step, block_size=_BLOCK_SIZE, cache_dtype=dtype))
    _compare(kernels, f"attention over {dtype}", plan.attend(got_q, cache, 0.25), expected, tolerance)


def _check_mla(kernels: NativeKernels, dtype: torch.dtype, generator: torch.Generator) -> None:
    """A decode after 69 tokens, and 2 queries after 9: more than a chunk and less, and heads that don't fill tiles."""
    shape = LatentShape(num_heads=5, latent_size=24, rope_size=8)
    cache = torch.randn(14, _BLOCK_SIZE, shape.entry_size, generator=generator).to(dtype)
    queries = torch.randn(3, shape.num_heads, shape.entry_size, generator=generator)
    step = {
        "query_starts": np.array([0, 1, 3], dtype=np.int32),
        "context_lens": np.array([70, 11], dtype=np.int32),
        "block_tables": np.stack((np.arange(1, 10), np.full(9, 12))).astype(np.int32),
    }
    step["block_tables"][1, 1] = 13
    expected = mla_reference.mla_attention(
        queries, cache, **step, scale=0.25, latent_size=shape.latent_size, kv_scale=None
    )
    planner = MlaPlanner(native_backend(dtype, kernels), shape)
    plan = planner.plan(StepRows(**step, block_size=_BLOCK_SIZE, cache_dtype=dtype))
    _compare(kernels, f"MLA over {dtype}", plan.attend(queries, cache, 0.25), expected, 1e-5)


def _check_draws(kernels: NativeKernels) -> None:
    """With uniforms in the middle of what a token has of the CDF: rounding cannot make it another one."""
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
        raise _wrong(kernels, f"draws give tokens {got.tolist()}, not {expected}")


def _compare(kernels: NativeKernels, what: str, got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    error = float((got.double() - expected).abs().max() / expected.abs().max())
    if not error < tolerance:
        raise _wrong(kernels, f"{what} is off by {error:.1e} of its largest value, where {tolerance:.0e} is allowed")


def _wrong(kernels: NativeKernels, what: str) -> NativeKernelsError:
    return NativeKernelsError(
        f"the {kernels.path.name} kernels compute wrongly on this machine: {what}; another compiler (CXX=clang++) may "
        "help"
    )


_log = logging.getLogger("octavo.kernels")


@lru_cache(maxsize=1)
def native_kernels() -> NativeKernels | None:
    """The kernels of this CPU; None, with a warning that says what to do, if they cannot be had.

    The first call may build them, which takes seconds. Raises NativeKernelsError if they compute wrongly.
    """
    path = path_of_this_cpu()
    if path is None:
        _log.warning("this CPU has no AVX2, which the C++ kernels need: computing with PyTorch, several times slower")
        return None
    try:
        kernels = NativeKernels(path, build(path))
    except (BuildError, OSError) as error:
        _log.warning("computing with PyTorch, several times slower than with the C++ kernels: %s", error)
        return None
    check_kernels(kernels)
    return kernels


def cpu_backend(dtype: torch.dtype, head_size: int) -> Backend:
    """The path for a model of `dtype` (float32 or bfloat16) on this CPU.

    C++ kernels, if they can be had, compute on as many threads as torch is set to now. The first call may build them.
    """
    kernels = native_kernels() if head_size % 8 == 0 else None
    return torch_backend(dtype) if kernels is None else native_backend(dtype, kernels)
