// Rounding of quantized_rows.h in vectors of 16, for the paths with AVX-512.
#pragma once

#include "../../native/cpp/vec16.h"
#include "quantized_rows.h"

namespace octavo {

inline int32_t largest_magnitude(V16, const float* x) {
    static_assert(kBlock == 32, "two vectors");
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    return _mm512_reduce_max_epi32(_mm512_max_epi32(_mm512_and_si512(_mm512_loadu_si512(x), magnitude),
                                                    _mm512_and_si512(_mm512_loadu_si512(x + 16), magnitude)));
}

inline int32_t round_block(const float* x, V16 factor, int8_t* values) {
    const __m512i low = _mm512_cvtps_epi32((V16::load(x) * factor).x);
    const __m512i high = _mm512_cvtps_epi32((V16::load(x + 16) * factor).x);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(values), _mm512_cvtepi32_epi8(low));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(values + 16), _mm512_cvtepi32_epi8(high));
    return _mm512_reduce_add_epi32(_mm512_add_epi32(low, high));
}

}  // namespace octavo
