// The inner loop of bf16 times bf16 on CPUs with AVX512_BF16: two products and a sum in one instruction. A lane's 32
// bits hold a pair of bf16; sums are float32, rounded to nearest, and denormal numbers count as 0.
#pragma once

#include <cstring>

#include "../../../native/cpp/vec16_bf16.h"
#include "../../../native/cpp/accumulate.h"
#include "../../../native/cpp/unroll.h"
#include "../../outputs.h"

namespace octavo {

template <class V>
V load_pairs(const bf16* p) {
    return V::load(reinterpret_cast<const float*>(p));
}

// Like FusedMultiplyAdd, for pairs of bf16.
struct DotOfPairs {
    template <class V>
    static V all(const bf16* a) {
        float pair;
        std::memcpy(&pair, a, 4);
        return V::all(pair);
    }
    OCTAVO_INLINED static void add_repeated(V16& sum, const bf16* a, V16 b) {
        OCTAVO_REPEATED("vdpbf16ps", sum.x, b.x, a);
    }
    V16 operator()(V16 a, V16 b, V16 c) const {
        return {_mm512_dpbf16_ps(c.x, (__m512bh)a.x, (__m512bh)b.x)};
    }
    V8 operator()(V8 a, V8 b, V8 c) const { return {_mm256_dpbf16_ps(c.x, (__m256bh)a.x, (__m256bh)b.x)}; }
};

// Like the float32 versions in accumulate.h. If count is odd, a row of `a` ends with a 0.
template <class V, int R, int N, class Fetch = NothingAhead>
inline void accumulate(V (&acc)[R][N], const bf16* a, int64_t lda, const bf16* const (&b)[N], int64_t stride,
                       int64_t count, Fetch ahead = {}) {
    V sums[R][N];
    copy(acc, sums);
    for (int64_t k = 0; k < count / 2; k++) {
        ahead(k);
        multiply_add(sums, [&](int r) OCTAVO_INLINED { return a + r * lda + 2 * k; },
                     [&](int v) OCTAVO_INLINED { return load_pairs<V>(b[v] + k * stride); }, DotOfPairs{});
    }
    // The number paired with the last one is arbitrary, and 0 times an infinity or NaN is not 0.
    if (count % 2) {
        multiply_add(
            sums, [&](int r) OCTAVO_INLINED { return a + r * lda + count - 1; },
            [&](int v) OCTAVO_INLINED { return only_first(load_pairs<V>(b[v] + count / 2 * stride)); }, DotOfPairs{});
    }
    copy(sums, acc);
}

// acc[r][v] += the products of a pair of inputs of row r, at a + r * lda, and of the columns' weights. A pair that is not
// whole ends with a 0 in the row and in the columns.
template <int R>
OCTAVO_INLINED inline void add_pair(V16 (&acc)[R][2], const bf16* a, int64_t lda, const V16 (&columns)[2], bool) {
    add_rows(acc, [&](int r) OCTAVO_INLINED { return a + r * lda; }, columns, DotOfPairs{});
}

// The outputs of a gated layer, from the sums of its gates and of its ups. They are rounded to bf16 next, so they need
// no exact silu.
inline V16 gated_for_bf16(const Linear& linear, const V16 (&acc)[2], int64_t p) {
    const V16 gate = with_bias(linear, acc[0], 0, p), up = with_bias(linear, acc[1], 1, p);
    const bool is_silu = linear.activation == kSilu;
    return is_silu ? silu_for_bf16(gate) * up : gated_otherwise<V16>(linear.activation, gate, up);
}

}  // namespace octavo
