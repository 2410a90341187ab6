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

constexpr int16_t kOneInBf16 = 0x3f80;

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

// 2^x, a weight that is rounded to bf16 next, for x <= 0: 1 for 0; 0 for -infinity; NaN for NaN.
inline V16 weight(V16 x) {
    const V16 f = {_mm512_reduce_ps(x.x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};  // x - floor(x)
    return {_mm512_scalef_ps(weight_of_fraction(f).x, x.x)};                           // y 2^floor(x)
}
inline V8 weight(V8 x) {
    const V8 clamped = clamp(x, -127.0f, 0.0f), whole = {_mm256_floor_ps(clamped.x)};
    return weight_of_fraction(clamped - whole) * exp2_of_whole(whole);
}

// Stores the weights 2^x of 32 positions, rounded to bf16. Lane i of 16 sums grows by those at 2 i and 2 i + 1.
OCTAVO_INLINED inline void add_weights(const V16 (&x)[2], bf16* p, V16 (&sums)[1]) {
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(weight(x[1]).x, weight(x[0]).x);
    _mm512_storeu_si512(p, both);
    sums[0].x = _mm512_dpbf16_ps(sums[0].x, (__m512bh)both, (__m512bh)_mm512_set1_epi16(kOneInBf16));
}
OCTAVO_INLINED inline void add_weights(const V8 (&x)[4], bf16* p, V8 (&sums)[2]) {
    for (int i = 0; i < 2; i++, p += 16) {
        store_rounded(weight(x[2 * i]), p);
        store_rounded(weight(x[2 * i + 1]), p + 8);
        const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        sums[i].x = _mm256_dpbf16_ps(sums[i].x, (__m256bh)both, (__m256bh)_mm256_set1_epi16(kOneInBf16));
    }
}
inline V8 add_halves(const V16 (&sums)[1]) { return low(sums[0]) + high(sums[0]); }
inline V8 add_halves(const V8 (&sums)[2]) { return sums[0] + sums[1]; }

}  // namespace octavo
