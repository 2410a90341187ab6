"""Device functions that kernels share: dots, conversions between dtypes, and the order of tiles.

The interpreter (TRITON_INTERPRET=1) computes with numpy, which has neither bf16 nor e4m3: dots of bf16 are wrong by
factors of 1e10, bf16 stores truncate, and e4m3 stores are sometimes off by an ulp. These functions give a GPU's
results under the interpreter, too.
"""

from typing import Literal

import triton.language as tl
from triton import knobs

from kernels.triton_common.jit import jit


@jit
def tile_of_program(tiles_m, tiles_n, group_m):
    """The (row, column) of program_id(0)'s tile. Successive programs go down group_m tiles, then on to the next column
    of tiles, so that programs that run at the same time share rows and columns in L2."""
    program = tl.program_id(0)
    band = program // (group_m * tiles_n)
    in_band = program % (group_m * tiles_n)
    height = tl.minimum(tiles_m - band * group_m, group_m)
    return band * group_m + in_band % height, in_band // height


INTERPRETED = tl.constexpr(knobs.runtime.interpret)

E4M3_MAX = tl.constexpr(448.0)

# How `e4m3_halves` converts: by an instruction that GPUs have from sm_89 on, or by moving bits, elsewhere.
PairForm = Literal["cvt", "bits"]


@jit
def recomputed(x):
    """The same int32, of which the compiler does not know that: what follows from it is computed anew, instead of being
    kept in registers since it was computed before."""
    if not INTERPRETED:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1)
    return x


@jit
def dot(a, b, acc):
    """acc + a @ b in float32; a and b have the same dtype: bf16, fp16, e4m3 or fp32, which is not rounded to tf32."""
    if INTERPRETED:
        # In float64, so that a row's result does not depend on its place in the tile: numpy's order of additions
        # differs from row to row, a tensor core's does not.
        a64, b64 = a.to(tl.float32).to(tl.float64), b.to(tl.float32).to(tl.float64)
        result = tl.dot(a64, b64, acc.to(tl.float64), out_dtype=tl.float64).to(tl.float32)
    else:
        result = tl.dot(a, b, acc, input_precision="ieee")
    return result


@jit
def widen(x):
    """Converts x to float32: fp16, bf16, fp32, e4m3, or the bits of e4m3 as uint8."""
    if x.dtype == tl.uint8:
        result = _e4m3_bits_to_fp16(x).to(tl.float32)
    else:
        result = x.to(tl.float32)
    return result


@jit
def widen_to(x, dtype: tl.constexpr):
    """Converts x, as for `widen` and no wider than dtype, to an operand of a dot. Exact: bf16 and fp16 hold every
    e4m3."""
    if x.dtype == tl.uint8:
        if dtype == tl.float16:
            result = _e4m3_bits_to_fp16(x)
        else:
            result = narrow(_e4m3_bits_to_fp16(x).to(tl.float32), dtype)
    else:
        result = x.to(dtype)
    return result


@jit
def e4m3_halves(pairs, FORM: tl.constexpr):
    """Two float16 tensors from uint16, each number of which holds two e4m3: those in the low bytes and those in the
    high bytes. FORM: a PairForm. Exact; NaN becomes 480 by "bits"."""
    if FORM == "cvt":
        # Two numbers of uint16 are a register: its low bytes become one pair of float16, its high bytes another.
        low, high = tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $2, 0, 0x3120; mov.b32 {a, b}, t;"
            " cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        low, high = _e4m3_bits_to_fp16(pairs & 0xFF), _e4m3_bits_to_fp16(pairs >> 8)
    return low, high


@jit
def narrow(x, dtype: tl.constexpr):
    """Rounds float32 x to dtype, ties to even: fp32, fp16, bf16, e4m3, or uint8 for the bits of e4m3.

    e4m3 saturates, and keeps NaN.
    """
    if dtype == tl.uint8:
        result = _to_e4m3_bits(x)
    elif dtype == tl.float8e4nv:
        if INTERPRETED:
            result = _to_e4m3_bits(x).to(tl.float8e4nv, bitcast=True)
        else:
            # On a GPU the conversion always saturates.
            result = x.to(tl.float8e4nv)
    elif dtype == tl.bfloat16 and INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        result = tl.where(x == x, rounded.to(tl.float32, bitcast=True), x).to(tl.bfloat16)
    else:
        result = x.to(dtype)
    return result


@jit
def _e4m3_bits_to_fp16(bits):
    """Moves exponent and mantissa to their places in fp16, whose bias is 8 more; also right for subnormals. NaN becomes
    480."""
    wide = bits.to(tl.uint16)
    fp16 = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return fp16.to(tl.float16, bitcast=True) * 256.0


@jit
def _to_e4m3_bits(x):
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = tl.minimum(tl.abs(x), E4M3_MAX)
    size_bits = size.to(tl.uint32, bitcast=True)
    # Adds half of the last place kept, less one if that place is even; 120 is the difference of the biases.
    normal = ((size_bits + 0x7FFFF + ((size_bits >> 20) & 1)) >> 20) - (120 << 3)
    # 16384's last place is 2^-9, the smallest e4m3: adding it rounds to multiples of that.
    subnormal = (size + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, subnormal, normal)
    return tl.where(x == x, sign | code, 0x7F).to(tl.uint8)
