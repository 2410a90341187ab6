// y = x W^T + b for weights in bf16 on CPUs with AVX512_BF16. What a gated layer returns is rounded to bf16 next: so it
// needs no exact silu, and can pass to the next layer in the form that this one reads.
#pragma once

#include <type_traits>

#include "../../linear.h"
#include "dots_bf16.h"
#include "short_linear.h"

namespace octavo {

// Stores the outputs of a gated layer, rounded, as the rows that the next one reads.
struct RowsOutput {
    const Linear& linear;
    bf16* rows;
    int64_t apart;

    void prefetch(int64_t r, int64_t p) const {
        _mm_prefetch(reinterpret_cast<const char*>(rows + r * apart + p * V16::W), _MM_HINT_T0);
    }

    void panel(const V16 (&acc)[2], int64_t r, int64_t p) const {
        const V16 value = gated_for_bf16(linear, acc, p);
        const int64_t c = p * V16::W, rest = linear.outputs - c;
        bf16* place = rows + r * apart + c;
        if (rest >= V16::W) {
            store_as_bf16(value, place);
            return;
        }
        bf16 values[V16::W];
        store_as_bf16(value, values);
        // A row of an odd number ends with a 0.
        for (int64_t i = 0; i < apart - c; i++) place[i] = i < rest ? values[i] : bf16{0};
    }
};

// An output of a layer that may be gated.
template <class Output>
struct ShortSilu {
    const Linear& linear;
    const Output& output;

    void prefetch(int64_t r, int64_t p) const { output.prefetch(r, p); }

    void panel(const V16 (&acc)[2], int64_t r, int64_t p) const {
        if (!linear.gated) return output.panel(acc, r, p);
        output.put(gated_for_bf16(linear, acc, p), r, p * V16::W);
    }
};

// Weights as they are.
struct WholePanels : FloatLinear<V16, bf16, bf16> {
    template <class Output>
    static void multiply(const Linear& linear, const bf16* a, int64_t lda, int64_t rows, const Output& output) {
        multiply_rows<V, bf16, bf16>(linear, a, lda, rows, output);
    }
};

// Panels: WholePanels, or ShortPanels<bf16>.
template <class Panels>
struct RoundedLinear : Panels {
    using V = V16;

    template <class Output>
    static void forward(const Linear& linear, const float* x, int64_t rows, const Output& output) {
        int64_t lda;
        const bf16* a = linear_inputs<bf16>(linear, x, rows, lda);
        if constexpr (std::is_same_v<Output, StoreOutput<V>>) {
            Panels::multiply(linear, a, lda, rows, ShortSilu<Output>{linear, output});
        } else {
            Panels::multiply(linear, a, lda, rows, output);
        }
    }

    // All rows can pass from a gated layer to the next: rounded, they fit into the memory for their floats.
    static bool can_pass(int64_t, int64_t) { return true; }

    static void store_for_next(const Linear& linear, const float* x, int64_t rows, float* y) {
        int64_t lda;
        const bf16* a = linear_inputs<bf16>(linear, x, rows, lda);
        Panels::multiply(linear, a, lda, rows,
                         RowsOutput{linear, reinterpret_cast<bf16*>(y), row_size<bf16>(linear.outputs)});
    }

    // x: from store_for_next.
    static void add_from_last(const Linear& linear, float* x, int64_t rows, float* y) {
        Panels::multiply(linear, reinterpret_cast<const bf16*>(x), row_size<bf16>(linear.inputs), rows,
                         StoreOutput<V>{linear, y, true});
    }
};

}  // namespace octavo
