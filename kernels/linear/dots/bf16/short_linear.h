// Linears of bf16 weights in 12 bits (short_panels.h) on CPUs with AVX-512: inputs are read as A, bf16 or float.
#pragma once

#include <atomic>

#include "../../linear.h"
#include "short_panels.h"

namespace octavo {

// Prefetches into L2: `bytes` with each step, in up to kLines lines.
template <int kLines>
struct AheadOfSteps {
    const char* place;
    int64_t bytes;
    OCTAVO_INLINED void operator()(int64_t step) const {
        unroll<kLines>([&](auto i) OCTAVO_INLINED { _mm_prefetch(place + step * bytes + i * 64, _MM_HINT_T1); });
    }
};

// acc[r][v] += the products of a pair of inputs of row r, at a + r * lda, and of the columns' weights; of the first
// alone if the second is beyond the last. dots_bf16.h has the same for inputs in bf16.
template <int R>
OCTAVO_INLINED inline void add_pair(V16 (&acc)[R][2], const float* a, int64_t lda, const V16 (&columns)[2], bool has_two) {
    const V16 first[2] = {columns[0].first_of_pairs(), columns[1].first_of_pairs()};
    add_rows(acc, [&](int r) OCTAVO_INLINED { return a + r * lda; }, first);
    if (!has_two) return;
    const V16 second[2] = {columns[0].second_of_pairs(), columns[1].second_of_pairs()};
    add_rows(acc, [&](int r) OCTAVO_INLINED { return a + r * lda + 1; }, second);
}

// Like the other `accumulate`s, for a panel in 12 bits.
template <int R, class A, class Fetch>
OCTAVO_INLINED inline void accumulate(V16 (&acc)[R][2], const A* a, int64_t lda, const ShortPanel& panel, int64_t inputs,
                                      Fetch ahead) {
    const ShortPanel::Exception* exception = panel.exceptions();
    V16 sums[R][2], columns[2][2];
    copy(acc, sums);
    int64_t step = 0;
    for (; step < inputs / ShortPanel::kInputs; step++, a += ShortPanel::kInputs) {
        ahead(step);
        panel.open(step, exception, columns);
        add_pair(sums, a, lda, columns[0], true);
        add_pair(sums, a + 2, lda, columns[1], true);
    }
    const int64_t rest = inputs % ShortPanel::kInputs;
    if (rest) {
        panel.open(step, exception, columns);
        add_pair(sums, a, lda, columns[0], rest > 1);
        if (rest > 2) add_pair(sums, a + 2, lda, columns[1], false);
    }
    copy(sums, acc);
}

// Computes R rows from row r on, times panel p. prefetches: see `tile`.
template <int R, class A, class Output, class Fetch>
void short_tile(const Linear& linear, const Output& output, const A* a, int64_t lda, int64_t r, const char* panel,
                int64_t p, bool prefetches, Fetch ahead) {
    V16 acc[R][2];
    unroll<R>([&](auto i) OCTAVO_INLINED { acc[i][0] = acc[i][1] = V16::zero(); });
    for (int i = 0; prefetches && i < R; i++) output.prefetch(r + i, p);
    accumulate(acc, a + r * lda, lda, ShortPanel(panel, linear.inputs), linear.inputs, ahead);
    for (int i = 0; i < R; i++) output.panel(acc[i], r + i, p);
}

// Computes rows [first, last) times panels [begin, end): like `block`. Each tile opens the weights in registers: that is
// faster than to keep them opened, which L1 has no room for.
template <class A, class Output>
void short_block(const Linear& linear, const Output& output, const A* a, int64_t lda, int64_t first, int64_t last,
                 int64_t begin, int64_t end) {
    // With 4 KiB, 8 rows take 3% more on a Zen 4.
    constexpr int64_t kAhead = 8192;
    const int64_t bytes = ShortPanel::bytes(linear.inputs);
    for (int64_t p = begin; p < end; p++) {
        const char* panel = static_cast<const char*>(linear.panels) + p * bytes;
        each_tile<V16>(first, last, [&](int64_t r, int64_t count, int64_t nth, int64_t tiles) {
            as_constant<kTileRows<V16>>(count, [&](auto R) {
                const auto run = [&](auto ahead) {
                    short_tile<R>(linear, output, a, lda, r, panel, p, tiles > 1, ahead);
                };
                if constexpr (R <= 2) {
                    run(NothingAhead{});  // a Zen 4's own prefetchers are faster: 6.0 ms for 1 row, not 6.6
                } else if (tiles == 1) {
                    run(AheadOfSteps<3>{panel + kAhead, ShortPanel::kStepBytes});
                } else {
                    run(AheadOfSteps<2>{panel + bytes + bytes * nth / tiles, ShortPanel::kStepBytes / tiles});
                }
            });
        });
    }
}

// Weights in 12 bits.
template <class A>
struct ShortPanels {
    using V = V16;

    static int64_t bytes(const Linear& linear) {
        return linear.inputs > ShortPanel::kMostInputs ? 0 : num_panels<V>(linear) * ShortPanel::bytes(linear.inputs);
    }

    // Returns false if a panel has too many exceptions.
    static bool pack(const Linear& linear, const WeightRows& weights, char* panels) {
        std::atomic<bool> all_fit{true};
        const int64_t pairs = ShortPanel::steps(linear.inputs) * 2;
        parallel(num_panels<V>(linear), [&](int64_t p) {
            auto* panel = static_cast<bf16*>(scratch(kSlotTile, pairs * 2 * kPanel<V> * sizeof(bf16)));
            pack_panel<V>(linear, weights.row<bf16>(0, linear.inputs), p, panel, pairs);
            if (!ShortPanel::pack(panel, linear.inputs, panels + p * ShortPanel::bytes(linear.inputs))) all_fit = false;
        });
        return all_fit;
    }

    // Passes the sums of all panels to `output`, for rows of inputs from linear_inputs.
    template <class Output>
    static void multiply(const Linear& linear, const A* a, int64_t lda, int64_t rows, const Output& output) {
        each_block<V>(linear, lda * sizeof(A), rows, [&](int64_t first, int64_t last, int64_t begin, int64_t end) {
            short_block(linear, output, a, lda, first, last, begin, end);
        });
    }

    // Passes the sums of all panels for x[rows, inputs] to `output`.
    template <class Output>
    static void forward(const Linear& linear, const float* x, int64_t rows, const Output& output) {
        int64_t lda;
        const A* a = linear_inputs<A>(linear, x, rows, lda);
        multiply(linear, a, lda, rows, output);
    }
};

}  // namespace octavo
