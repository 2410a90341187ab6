// Numbers of 8 bits: a sign, 4 bits of exponent (bias 7) and 3 of mantissa; no infinities, and NaN is 0x7f (arXiv
// 2209.05433).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "vec.h"

namespace octavo {

struct e4m3 {
    uint8_t bits;
};

// Rounds to nearest, ties to even; what is too large becomes 448 or -448, the largest numbers. NaN stays NaN.
inline e4m3 to_e4m3(float x) {
    constexpr uint32_t kLargest = 0x7e, kNan = 0x7f, kBias = 120 << 3;  // of float32 over e4m3
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
    const uint32_t rounded = (magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20;
    uint32_t number = rounded > kBias + kLargest ? kLargest : rounded - kBias;
    // Below 2^-6 numbers are multiples of 2^-9: so many as are added to the last bits of 1.5 * 2^14.
    const float multiples = std::fabs(x) + 24576.0f;
    uint32_t small;
    std::memcpy(&small, &multiples, 4);
    if (magnitude < 0x3c800000) number = small & 0xf;
    if (magnitude > 0x7f800000) number = kNan;
    return {static_cast<uint8_t>(sign | number)};
}

// Widens numbers, a multiple of 16. Each is one of bf16, and of float16, which has the same bits but for a factor of 2^8.
// NaN becomes 480: the step that writes it to a cache has other ways to notice.
inline void widen(V8, const e4m3* from, int64_t count, bf16* to) {
    for (int64_t i = 0; i < count; i += 16) {
        const __m256i bits = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
        const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi16(0x7f));
        const __m256i sign = _mm256_slli_epi16(_mm256_xor_si256(bits, magnitude), 8);
        const __m256i half = _mm256_or_si256(sign, _mm256_slli_epi16(magnitude, 7));
        const auto upper = [](__m128i eight) {
            const __m256 value = _mm256_mul_ps(_mm256_cvtph_ps(eight), _mm256_set1_ps(256.0f));
            return _mm256_srli_epi32(_mm256_castps_si256(value), 16);
        };
        const __m256i packed = _mm256_packus_epi32(upper(_mm256_castsi256_si128(half)),
                                                   upper(_mm256_extracti128_si256(half, 1)));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), _mm256_permute4x64_epi64(packed, 0xd8));
    }
}

}  // namespace octavo
