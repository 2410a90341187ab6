// Vectors of 16 floats, for the paths with AVX-512. Each lane's results are bitwise those of a lane of V8.
#pragma once

#include "e4m3.h"
#include "unroll.h"
#include "vec.h"

namespace octavo {

struct V16 {
    static constexpr int W = 16;
    __m512 x;
    static V16 zero() { return {_mm512_setzero_ps()}; }
    static V16 all(float a) { return {_mm512_set1_ps(a)}; }
    static V16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
    void store(float* p) const { _mm512_storeu_ps(p, x); }
    // The first, or the second, of each of 16 pairs of bf16, in memory order.
    static V16 first(const bf16* p) { return load_pairs(p).first_of_pairs(); }
    static V16 second(const bf16* p) { return load_pairs(p).second_of_pairs(); }
    V16 first_of_pairs() const {
        return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(x), 16))};
    }
    V16 second_of_pairs() const {
        const __m512i mask = _mm512_set1_epi32(static_cast<int>(0xffff0000));
        return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), mask))};
    }

   private:
    static V16 load_pairs(const bf16* p) { return {_mm512_castsi512_ps(_mm512_loadu_si512(p))}; }
};

inline V16 operator+(V16 a, V16 b) { return {_mm512_add_ps(a.x, b.x)}; }
inline V16 operator-(V16 a, V16 b) { return {_mm512_sub_ps(a.x, b.x)}; }
inline V16 operator*(V16 a, V16 b) { return {_mm512_mul_ps(a.x, b.x)}; }
inline V16 operator/(V16 a, V16 b) { return {_mm512_div_ps(a.x, b.x)}; }
inline V16 max(V16 a, V16 b) { return {_mm512_max_ps(a.x, b.x)}; }
inline V16 fma(V16 a, V16 b, V16 c) { return {_mm512_fmadd_ps(a.x, b.x, c.x)}; }

// sum = instruction(sum, columns, the 32 bits at `place` in all lanes). The instruction itself repeats them: with a
// broadcast for each row, linears of 8 rows and more take 7% longer on a Zen 4.
#define OCTAVO_REPEATED(instruction, sum, columns, place)                              \
    asm(instruction " %1%{1to16%}, %2, %0"                                             \
        : "+v"(sum)                                                                    \
        : "m"(*reinterpret_cast<const ::octavo::AnyBits*>(place)), "v"(columns))
using AnyBits __attribute__((may_alias)) = uint32_t;

#ifdef __AVX512F__  // not where tests emulate it
template <>
inline constexpr bool kRepeats<V16> = true;
#endif

// sum += b times the number at a.
OCTAVO_INLINED inline void add_product(V16& sum, const float* a, V16 b) {
    OCTAVO_REPEATED("vfmadd231ps", sum.x, b.x, a);
}

inline V16 only_first(V16 pairs) {
    return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(pairs.x), _mm512_set1_epi32(0xffff)))};
}

inline V16 store_rounded(V16 v, bf16* p) {
    const __m512i bits = _mm512_castps_si512(v.x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff));
    const __m512i halves = _mm512_srli_epi32(rounded, 16);
    const __m256i packed = _mm256_packus_epi32(_mm512_castsi512_si256(halves), _mm512_extracti32x8_epi32(halves, 1));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(halves, 16))};
}

inline V8 low(V16 v) { return {_mm512_castps512_ps256(v.x)}; }
inline V8 high(V16 v) { return {_mm512_extractf32x8_ps(v.x, 1)}; }
inline V8 add_by_eights(V8 to, V16 v) { return to + low(v) + high(v); }
inline float first(V16 v) { return first(low(v)); }
inline V8 larger_half(V16 v) { return max(low(v), high(v)); }
inline float largest(V16 v) { return largest(larger_half(v)); }

inline V16 nearest(V16 x) {
    return {_mm512_roundscale_ps(x.x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

// As that of V8. Below -126.5 the nearest whole number is no exponent.
inline V16 exp2(V16 x) {
    const V16 most = {_mm512_min_ps(_mm512_set1_ps(kMostExp2), x.x)}, whole = nearest(most);  // NaN: the second operand
    const __mmask16 is_large = _mm512_cmp_ps_mask(x.x, _mm512_set1_ps(-126.5f), _CMP_NLT_UQ);
    return {_mm512_maskz_scalef_ps(is_large, exp2_of_fraction(most - whole).x, whole.x)};
}

// As that of V8. The upper byte of a bf16 follows from the upper half of the e4m3 number's bits, the lower byte from the
// lower half; below 2^-6 both follow from the lower half, but for the sign.
inline void widen(V16, const e4m3* from, int64_t count, bf16* to) {
    const auto table = [](auto... bytes) { return _mm512_broadcast_i32x4(_mm_setr_epi8(static_cast<char>(bytes)...)); };
    const __m512i uppers = table(60, 61, 62, 63, 64, 65, 66, 67, 60, 61, 62, 63, 64, 65, 66, 67);
    const __m512i small_uppers = table(0, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m512i small_lowers = table(0, 0, 0x80, 0xc0, 0, 0x20, 0x40, 0x60, 0, 0, 0, 0, 0, 0, 0, 0);
    // Unpacking takes 8 numbers of each 16.
    const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0), low_half = _mm512_set1_epi8(0x0f);
    int64_t i = 0;
    for (; i + 64 <= count; i += 64) {
        const __m512i bits = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(from + i));
        const __m512i low_bits = _mm512_and_si512(bits, low_half);
        const __m512i high_bits = _mm512_and_si512(_mm512_srli_epi16(bits, 4), low_half);
        const __mmask64 is_small = _mm512_testn_epi8_mask(bits, _mm512_set1_epi8(0x78));
        const __m512i lower = _mm512_mask_shuffle_epi8(_mm512_slli_epi16(low_bits, 4), is_small, small_lowers, low_bits);
        __m512i upper = _mm512_shuffle_epi8(uppers, high_bits);
        upper = _mm512_mask_shuffle_epi8(upper, is_small, small_uppers, low_bits);
        const __m512i sign = _mm512_and_si512(bits, _mm512_set1_epi8(static_cast<char>(0x80)));
        upper = _mm512_or_si512(upper, sign);
        _mm512_storeu_si512(to + i, _mm512_unpacklo_epi8(lower, upper));
        _mm512_storeu_si512(to + i + 32, _mm512_unpackhi_epi8(lower, upper));
    }
    if (i < count) widen(V8{}, from + i, count - i, to + i);
}

}  // namespace octavo
