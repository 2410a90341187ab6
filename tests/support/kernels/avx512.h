// Instructions of AVX-512 that SIMDe lacks, in plain C++; included after it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace emulated {

// x - floor(x); 0 for infinities. kRounding: towards minus infinity, which is all that kernels use.
template <int kRounding>
inline __m512 reduce(__m512 x) {
    static_assert(kRounding == (_MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC));
    float lanes[16];
    std::memcpy(lanes, &x, sizeof lanes);
    for (float& lane : lanes) lane = std::isinf(lane) ? 0.0f : lane - std::floor(lane);
    std::memcpy(&x, lanes, sizeof lanes);
    return x;
}

// Rounds to nearest, ties to even; denormal numbers become 0, and NaN stays NaN.
inline __m256i to_bf16(__m512 x) {
    uint32_t lanes[16];
    uint16_t rounded[16];
    std::memcpy(lanes, &x, sizeof lanes);
    for (int i = 0; i < 16; i++) {
        const uint32_t bits = lanes[i], size = bits & 0x7fffffff;
        if (size > 0x7f800000) {
            rounded[i] = static_cast<uint16_t>(bits >> 16 | 0x40);
        } else if (size < 0x00800000) {
            rounded[i] = static_cast<uint16_t>((bits & 0x80000000) >> 16);
        } else {
            rounded[i] = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
        }
    }
    __m256i result;
    std::memcpy(&result, rounded, sizeof rounded);
    return result;
}

// Rounds 32 numbers so, those of `low` first.
inline __m512i to_bf16(__m512 high, __m512 low) {
    const __m256i halves[2] = {to_bf16(low), to_bf16(high)};
    __m512i result;
    std::memcpy(&result, halves, sizeof halves);
    return result;
}

// Keeps the low byte of each of 16 integers.
inline __m128i to_bytes(__m512i x) {
    int32_t lanes[16];
    uint8_t bytes[16];
    std::memcpy(lanes, &x, sizeof lanes);
    for (int i = 0; i < 16; i++) bytes[i] = static_cast<uint8_t>(lanes[i]);
    __m128i result;
    std::memcpy(&result, bytes, sizeof bytes);
    return result;
}

inline int32_t sum(__m512i x) {
    int32_t lanes[16], total = 0;
    std::memcpy(lanes, &x, sizeof lanes);
    for (int32_t lane : lanes) total += lane;
    return total;
}

}  // namespace emulated

#define _mm512_reduce_ps(x, rounding) emulated::reduce<(rounding)>(x)
#define _mm512_cvtneps_pbh emulated::to_bf16
#define _mm512_cvtne2ps_pbh emulated::to_bf16
#define _mm512_cvtepi32_epi8 emulated::to_bytes
#define _mm512_reduce_add_epi32 emulated::sum
#define _mm512_testn_epi8_mask(x, y) _mm512_cmpeq_epi8_mask(_mm512_and_si512(x, y), _mm512_setzero_si512())
