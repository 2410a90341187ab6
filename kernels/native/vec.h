// Vectors of float32 in the width of the instruction set a file is compiled for, and bf16 widened into them.
//
// Sums are written as explicit fused multiply-adds in a fixed order, and files are compiled with -ffp-contract=off, so
// that the same sum has the same bits in every instantiation of a template.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace octavo {

using bf16 = uint16_t;

// To nearest, ties to even; NaN stays NaN.
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

// 8 floats. Every path has these: attention and the elementwise kernels use no other width.
struct V8 {
    static constexpr int W = 8;
    __m256 x;
    static V8 zero() { return {_mm256_setzero_ps()}; }
    static V8 all(float a) { return {_mm256_set1_ps(a)}; }
    static V8 load(const float* p) { return {_mm256_loadu_ps(p)}; }
    void store(float* p) const { _mm256_storeu_ps(p, x); }
    // Of 8 pairs of bf16, in memory order: the first, or the second, of each.
    static V8 first(const bf16* p) {
        return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), 16))};
    }
    static V8 second(const bf16* p) {
        const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(0xffff0000)));
        return {_mm256_and_ps(_mm256_loadu_ps(reinterpret_cast<const float*>(p)), mask)};
    }
};

inline V8 operator+(V8 a, V8 b) { return {_mm256_add_ps(a.x, b.x)}; }
inline V8 operator-(V8 a, V8 b) { return {_mm256_sub_ps(a.x, b.x)}; }
inline V8 operator*(V8 a, V8 b) { return {_mm256_mul_ps(a.x, b.x)}; }
inline V8 operator/(V8 a, V8 b) { return {_mm256_div_ps(a.x, b.x)}; }
inline V8 max(V8 a, V8 b) { return {_mm256_max_ps(a.x, b.x)}; }
inline V8 fma(V8 a, V8 b, V8 c) { return {_mm256_fmadd_ps(a.x, b.x, c.x)}; }

// Whether an element of a is not less than its counterpart in b: greater, equal, or one of both is NaN.
inline bool any_not_less(V8 a, V8 b) { return _mm256_movemask_ps(_mm256_cmp_ps(a.x, b.x, _CMP_NLT_UQ)) != 0; }

inline float sum(V8 v) {
    __m128 a = _mm_add_ps(_mm256_castps256_ps128(v.x), _mm256_extractf128_ps(v.x, 1));
    a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
}

inline float largest(V8 v) {
    __m128 a = _mm_max_ps(_mm256_castps256_ps128(v.x), _mm256_extractf128_ps(v.x, 1));
    a = _mm_max_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)));
}

// 2^x: within 2 ulp for x in [-126, 127]; 0 below, -inf included; 2^127 or so above. NaN for NaN.
inline V8 exp2(V8 x) {
    const __m256 low = _mm256_set1_ps(-127.0f), high = _mm256_set1_ps(127.5f);
    __m256 clamped = _mm256_max_ps(low, _mm256_min_ps(high, x.x));  // the second operand, x, is kept if it is NaN
    __m256 whole = _mm256_round_ps(clamped, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    V8 f = {_mm256_sub_ps(clamped, whole)};
    // Taylor's series of 2^f = e^(f ln 2) for |f| <= 1/2: the first term left out is at most 5e-9.
    V8 y = V8::all(1.5252733804e-5f);
    y = fma(y, f, V8::all(1.5403530394e-4f));
    y = fma(y, f, V8::all(1.3333558147e-3f));
    y = fma(y, f, V8::all(9.6181291076e-3f));
    y = fma(y, f, V8::all(5.5504108665e-2f));
    y = fma(y, f, V8::all(2.4022650696e-1f));
    y = fma(y, f, V8::all(6.9314718056e-1f));
    y = fma(y, f, V8::all(1.0f));
    __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
    __m256 scale = _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
    return {_mm256_mul_ps(y.x, scale)};
}

constexpr float kLog2E = 1.44269504088896341f;

// x / (1 + e^-x)
inline V8 silu(V8 x) { return x / (V8::all(1.0f) + exp2(x * V8::all(-kLog2E))); }

#ifdef __AVX512F__
// 16 floats, for linears.
struct V16 {
    static constexpr int W = 16;
    __m512 x;
    static V16 zero() { return {_mm512_setzero_ps()}; }
    static V16 all(float a) { return {_mm512_set1_ps(a)}; }
    static V16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
    void store(float* p) const { _mm512_storeu_ps(p, x); }
    static V16 first(const bf16* p) {
        return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))};
    }
    static V16 second(const bf16* p) {
        __m512i mask = _mm512_set1_epi32(static_cast<int>(0xffff0000));
        return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), mask))};
    }
};

inline V16 fma(V16 a, V16 b, V16 c) { return {_mm512_fmadd_ps(a.x, b.x, c.x)}; }
#endif

}  // namespace octavo
