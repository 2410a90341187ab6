// Rounds vectors of 16 floats to bf16 and stores them, for CPUs with AVX512_BF16.
#pragma once

#include "vec16.h"

namespace octavo {

// Like store_rounded, in one instruction: denormal numbers become 0, as they count in sums, and NaN stays NaN.
inline V16 store_as_bf16(V16 v, bf16* p) {
    const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(v.x);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), rounded);
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16))};
}

// 2^f for f in [0, 1): within 3e-6.
template <class V>
V weight_of_fraction(V f) {
    V y = V::all(1.3426685532e-2f);
    y = fma(y, f, V::all(5.2242472200e-2f));
    y = fma(y, f, V::all(2.4128020570e-1f));
    y = fma(y, f, V::all(6.9304484478e-1f));
    return fma(y, f, V::all(1.0f));
}

// x / (1 + e^-x), for numbers that are rounded to bf16 later: within 7e-5 of the value.
inline V16 silu_for_bf16(V16 x) {
    const V16 t = x * V16::all(-kLog2E), f = {_mm512_reduce_ps(t.x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};
    const V16 power = {_mm512_scalef_ps(weight_of_fraction(f).x, t.x)};  // 2^t
    return x * V16{_mm512_rcp14_ps((V16::all(1.0f) + power).x)};
}

// Stores 2^x, a weight, rounded to bf16, for x <= 0: 1 for 0; 0 for -infinity; NaN for NaN. Returns the stored numbers.
inline V16 store_weights(V16 x, bf16* p) {
    const V16 f = {_mm512_reduce_ps(x.x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};  // x - floor(x)
    return store_as_bf16({_mm512_scalef_ps(weight_of_fraction(f).x, x.x)}, p);         // y 2^floor(x)
}
inline V8 store_weights(V8 x, bf16* p) {
    const V8 clamped = clamp(x, -127.0f, 0.0f), whole = {_mm256_floor_ps(clamped.x)};
    return store_rounded(weight_of_fraction(clamped - whole) * exp2_of_whole(whole), p);
}

}  // namespace octavo
