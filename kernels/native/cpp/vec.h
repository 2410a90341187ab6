// Vectors of float32, and bf16 widened into them.
//
// Sums are explicit fused multiply-adds in a fixed order, and files are compiled with -ffp-contract=off, so that the
// same sum has the same bits in every instantiation of a template.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace octavo {

using bf16 = uint16_t;

// Rounds to nearest, ties to even; NaN stays NaN.
inline bf16 to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<bf16>((bits >> 16) | 0x40);
    return static_cast<bf16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float to_float(bf16 x) {
    const uint32_t bits = uint32_t{x} << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// 8 floats. Every path has them; elementwise kernels use no other width.
struct V8 {
    static constexpr int W = 8;
    __m256 x;
    static V8 zero() { return {_mm256_setzero_ps()}; }
    static V8 all(float a) { return {_mm256_set1_ps(a)}; }
    static V8 load(const float* p) { return {_mm256_loadu_ps(p)}; }
    void store(float* p) const { _mm256_storeu_ps(p, x); }
    // The first, or the second, of each of 8 pairs of bf16, in memory order.
    static V8 first(const bf16* p) {
        return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), 16))};
    }
    static V8 second(const bf16* p) {
        const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(0xffff0000)));
        return {_mm256_and_ps(_mm256_loadu_ps(reinterpret_cast<const float*>(p)), mask)};
    }
};

// True if instructions for vectors V repeat a number in memory in all lanes: see vec16.h.
template <class V>
inline constexpr bool kRepeats = false;

inline V8 operator+(V8 a, V8 b) { return {_mm256_add_ps(a.x, b.x)}; }
inline V8 operator-(V8 a, V8 b) { return {_mm256_sub_ps(a.x, b.x)}; }
inline V8 operator*(V8 a, V8 b) { return {_mm256_mul_ps(a.x, b.x)}; }
inline V8 operator/(V8 a, V8 b) { return {_mm256_div_ps(a.x, b.x)}; }
inline V8 max(V8 a, V8 b) { return {_mm256_max_ps(a.x, b.x)}; }
inline V8 min(V8 a, V8 b) { return {_mm256_min_ps(a.x, b.x)}; }
inline V8 fma(V8 a, V8 b, V8 c) { return {_mm256_fmadd_ps(a.x, b.x, c.x)}; }

// Pairs of bf16 with the second of each set to 0.
inline V8 only_first(V8 pairs) {
    return {_mm256_and_ps(pairs.x, _mm256_castsi256_ps(_mm256_set1_epi32(0xffff)))};
}

// Rounds to bf16 like to_bf16, and stores the result. Returns the rounded numbers.
inline V8 store_rounded(V8 v, bf16* p) {
    const __m256i bits = _mm256_castps_si256(v.x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7fff));
    const __m256i halves = _mm256_srli_epi32(rounded, 16);
    const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
    return {_mm256_castsi256_ps(_mm256_slli_epi32(halves, 16))};
}

// Clamps x to [low, high]; NaN stays, since max and min return their second operand for it.
inline V8 clamp(V8 x, float low, float high) {
    return {_mm256_max_ps(_mm256_set1_ps(low), _mm256_min_ps(_mm256_set1_ps(high), x.x))};  // NaN: the second operand
}

inline V8 nearest(V8 x) { return {_mm256_round_ps(x.x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }

// 2^x for whole x in [-127, 127]; 0 for -127.
inline V8 exp2_of_whole(V8 x) {
    __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(x.x), _mm256_set1_epi32(127));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23))};
}

// True if an element of a is not less than its counterpart in b: greater, equal, or one of them is NaN.
inline int not_less(V8 a, V8 b) { return _mm256_movemask_ps(_mm256_cmp_ps(a.x, b.x, _CMP_NLT_UQ)); }
inline bool any_not_less(V8 a, V8 b) { return not_less(a, b) != 0; }

// Returns to + the first 8 of v + the next 8 and so on: the same sums for every width.
inline V8 add_by_eights(V8 to, V8 v) { return to + v; }

inline float sum(V8 v) {
    __m128 a = _mm_add_ps(_mm256_castps256_ps128(v.x), _mm256_extractf128_ps(v.x, 1));
    a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
}

// As that of V16: the larger numbers of two halves.
inline V8 larger_half(V8 v) { return v; }

inline float first(V8 v) { return _mm256_cvtss_f32(v.x); }

inline float largest(V8 v) {
    __m128 a = _mm_max_ps(_mm256_castps256_ps128(v.x), _mm256_extractf128_ps(v.x, 1));
    a = _mm_max_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)));
}

// Combines the numbers within each of 8 vectors as sum() and largest() do: lane i of the result is that of v[i].
template <class F>
inline V8 combine_each(const V8 (&v)[8], F&& f) {
    V8 fours[4], twos[2];
    for (int i = 0; i < 4; i++) {
        const __m256 a = v[i].x, b = v[i + 4].x;
        fours[i] = f(V8{_mm256_permute2f128_ps(a, b, 0x20)}, V8{_mm256_permute2f128_ps(a, b, 0x31)});
    }
    for (int i = 0; i < 2; i++) {
        const __m256d a = _mm256_castps_pd(fours[2 * i].x), b = _mm256_castps_pd(fours[2 * i + 1].x);
        twos[i] = f(V8{_mm256_castpd_ps(_mm256_unpacklo_pd(a, b))}, V8{_mm256_castpd_ps(_mm256_unpackhi_pd(a, b))});
    }
    const __m256 a = twos[0].x, b = twos[1].x;
    return f(V8{_mm256_shuffle_ps(a, b, 0x88)}, V8{_mm256_shuffle_ps(a, b, 0xdd)});
}
inline V8 sum_each(const V8 (&v)[8]) {
    return combine_each(v, [](V8 a, V8 b) { return a + b; });
}
inline V8 largest_each(const V8 (&v)[8]) {
    return combine_each(v, [](V8 a, V8 b) { return max(a, b); });
}

inline float smallest(V8 v) {
    __m128 a = _mm_min_ps(_mm256_castps256_ps128(v.x), _mm256_extractf128_ps(v.x, 1));
    a = _mm_min_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_min_ss(a, _mm_movehdup_ps(a)));
}

// exp2's largest argument: its nearest whole number is the exponent of a float.
constexpr float kMostExp2 = 127.49f;

// 2^f for |f| <= 1/2, by Taylor's series of e^(f ln 2): the first term left out is at most 5e-9.
template <class V>
V exp2_of_fraction(V f) {
    V y = V::all(1.5252733804e-5f);
    y = fma(y, f, V::all(1.5403530394e-4f));
    y = fma(y, f, V::all(1.3333558147e-3f));
    y = fma(y, f, V::all(9.6181291076e-3f));
    y = fma(y, f, V::all(5.5504108665e-2f));
    y = fma(y, f, V::all(2.4022650696e-1f));
    y = fma(y, f, V::all(6.9314718056e-1f));
    return fma(y, f, V::all(1.0f));
}

// 2^x: within 2 ulp for x in [-126, 127]; 0 below, -inf included; 2^127 or so above. NaN for NaN.
template <class V>
V exp2(V x) {
    const V clamped = clamp(x, -127.0f, kMostExp2), whole = nearest(clamped);
    return exp2_of_fraction(clamped - whole) * exp2_of_whole(whole);
}

constexpr float kLog2E = 1.44269504088896341f;

// x / (1 + e^-x)
template <class V>
V silu(V x) {
    return x / (V::all(1.0f) + exp2(x * V::all(-kLog2E)));
}

// x (1 + tanh(u)) / 2 = x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3)
inline V8 gelu_tanh(V8 x) {
    const V8 inner = fma(x * x * V8::all(0.044715f), x, x);
    return x / (V8::all(1.0f) + exp2(inner * V8::all(-1.5957691216057308f * kLog2E)));
}

// gate (up + 1) / (1 + e^(-1.702 gate)), with gate at most 7 and up within [-7, 7]; NaN stays.
inline V8 clamped_swiglu(V8 gate, V8 up) {
    constexpr float kLimit = 7.0f, kAlpha = 1.702f;
    const V8 least = {_mm256_min_ps(_mm256_set1_ps(kLimit), gate.x)};
    const V8 activated = least / (V8::all(1.0f) + exp2(least * V8::all(-kAlpha * kLog2E)));
    return activated * (clamp(up, -kLimit, kLimit) + V8::all(1.0f));
}

// cap tanh(x / cap) = cap - 2 cap / (1 + e^(2 x / cap)); e^x of a large x is huge but finite.
inline V8 soft_capped(V8 x, float cap) {
    return V8::all(cap) - V8::all(2 * cap) / (V8::all(1.0f) + exp2(x * V8::all(2 * kLog2E / cap)));
}

}  // namespace octavo
