// Draws one token from each of many rows, as defined by kernels/sampling/numpy_cpu.py.
//
// One thread computes a row, with sums in a fixed order: its token does not depend on other rows. A row is read in
// blocks. Filters gather the few tokens that they may keep, by a bound on logits, and compute only their weights.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>

#include "../native/cpp/pool.h"
#include "../native/cpp/vec.h"
#include "select.h"

namespace octavo {

// Matches DrawsStruct in kernels/sampling/native.py. Arrays have one element per draw.
struct Draws {
    const float* logits;        // [rows, vocabulary]
    const int64_t* rows;        // the row of logits
    const float* temperatures;  // above 0
    const double* uniforms;     // in [0, 1)
    const int64_t* top_k;       // 0: off
    const double* top_p;        // in (0, 1]
    const float* min_p;         // in [0, 1]
    int64_t vocabulary;
    int64_t count;
};

constexpr int64_t kDrawBlock = 256;
// Logits tested together when few tokens are wanted: with fewer, branches would cost more than the copies they save.
constexpr int64_t kTogether = 64;
// Guesses of how much less light tokens weigh together than their number allows, from bold to safe. With SmolLM2's
// logits at temperature 1, the first finds half the cuts for top_p 0.9 to 0.99, the second nearly all.
constexpr double kTrust[] = {24, 6, 1};
constexpr float kNever = -std::numeric_limits<float>::infinity();  // the logit of a token without weight

// One draw.
struct Draw {
    const float* logits;
    int64_t vocabulary;
    int64_t blocks;
    float scale;                 // of logits, to exponents of 2
    float most;                  // the largest logit; NaN if one is NaN
    double* sums;                // of weights, by block
    float *maxima, *ranked;      // of logits, by block
    float *weights, *selection;  // of gathered tokens; like ids, with one block of slack
    int32_t* ids;                // of gathered tokens
    float* last;                 // the last block of logits, filled up

    Draw(const float* logits, int64_t vocabulary, float temperature)
        : logits(logits), vocabulary(vocabulary), blocks((vocabulary + kDrawBlock - 1) / kDrawBlock),
          scale(std::min(kLog2E / temperature, std::numeric_limits<float>::max())) {
        const int64_t tokens = (blocks + 1) * kDrawBlock;
        char* memory = static_cast<char*>(scratch(kSlotDraw, blocks * 16 + tokens * 12 + kDrawBlock * 4));
        sums = reinterpret_cast<double*>(memory);
        maxima = reinterpret_cast<float*>(sums + blocks);
        ranked = maxima + blocks;
        weights = ranked + blocks;
        selection = weights + tokens;
        ids = reinterpret_cast<int32_t*>(selection + tokens);
        last = selection + 2 * tokens;
        const int64_t rest = vocabulary - (blocks - 1) * kDrawBlock;
        std::copy(logits + vocabulary - rest, logits + vocabulary, last);
        std::fill(last + rest, last + kDrawBlock, kNever);
        most = find_maxima();
    }

    const float* block(int64_t b) const { return b < blocks - 1 ? logits + b * kDrawBlock : last; }

    // The weight of a logit; 2^0 for the likeliest token.
    V8 weight(V8 logit) const { return exp2((logit - V8::all(most)) * V8::all(scale)); }

    // Fills the blocks' maxima and returns the row's: NaN if a logit is NaN.
    float find_maxima() const {
        V8 nan = V8::zero();
        float largest_yet = kNever;
        for (int64_t b = 0; b < blocks; b++) {
            const float* from = block(b);
            V8 four[4] = {V8::all(kNever), V8::all(kNever), V8::all(kNever), V8::all(kNever)};
            for (int64_t i = 0; i < kDrawBlock; i += 8) {
                V8 v = V8::load(from + i);
                four[i / 8 % 4] = max(four[i / 8 % 4], v);
                nan.x = _mm256_or_ps(nan.x, _mm256_cmp_ps(v.x, v.x, _CMP_UNORD_Q));
            }
            maxima[b] = largest(max(max(four[0], four[1]), max(four[2], four[3])));
            largest_yet = std::max(largest_yet, maxima[b]);
        }
        return _mm256_movemask_ps(nan.x) ? kNaN : largest_yet;
    }

    // Sums all tokens' weights by block, and returns the total.
    double sum_all() const {
        double total = 0;
        for (int64_t b = 0; b < blocks; b++) {
            const float* from = block(b);
            Sum sum;
            for (int64_t i = 0; i < kDrawBlock; i += 8) sum.add(weight(V8::load(from + i)));
            total += sums[b] = sum.total();
        }
        return total;
    }

    // Gathers the tokens whose logits are at least `bound`, with weights, in order of id. Returns their number.
    int64_t gather(float bound) const {
        const __m256i in_order = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        int64_t found = 0;
        for (int64_t b = 0; b < blocks; b++) {
            if (maxima[b] < bound) continue;
            const float* from = block(b);
            for (int64_t i = 0; i < kDrawBlock; i += kTogether) {
                V8 most_here = V8::load(from + i);
                for (int64_t j = 8; j < kTogether; j += 8) most_here = max(most_here, V8::load(from + i + j));
                if (!at_least(most_here, V8::all(bound))) continue;
                for (int64_t j = i; j < i + kTogether; j += 8) {
                    V8 v = V8::load(from + j);
                    const int mask = at_least(v, V8::all(bound));
                    const __m256i first = _mm256_set1_epi32(static_cast<int>(b * kDrawBlock + j));
                    store_chosen(_mm256_add_epi32(first, in_order), mask, ids + found);
                    found += store_chosen(_mm256_castps_si256(v.x), mask, weights + found);
                }
            }
        }
        for (int64_t i = 0; i < found; i += 8) weight(V8::load(weights + i)).store(weights + i);
        return found;
    }

    // Copies the gathered weights of at least `bound` to `selection`. Returns their number.
    int64_t choose(int64_t found, float bound) const {
        int64_t chosen = 0;
        for (int64_t i = 0; i < found; i += 8) {
            V8 v = load_first(weights + i, found - i, kNaN);
            chosen += store_chosen(_mm256_castps_si256(v.x), at_least(v, V8::all(bound)), selection + chosen);
        }
        return chosen;
    }

    // The least weight that top_k and top_p keep, judging by the gathered tokens; 0 if these are too few to tell.
    // total: the sum of all weights, if top_k is 0.
    float least_weight(int64_t found, int64_t top_k, double top_p, double total) const {
        float least = 0.0f;
        if (top_k > 0) {
            if (found < top_k) return 0.0f;
            least = select<Count>(selection, choose(found, 0.0f), static_cast<double>(top_k));
            // Equal tokens at the end of the top_k likeliest count only as far as there is room.
            const int64_t heavier = choose(found, std::nextafter(least, 2.0f));
            total = Weight::of(selection, heavier, 0.0f) + static_cast<double>(top_k - heavier) * least;
        }
        if (top_p == 1.0) return least;
        return std::max(least, select<Weight>(selection, choose(found, least), top_p * total));
    }

    // The first token, by number, at which the running sum of weights exceeds uniform * total. weights_of(b): the
    // weights of block b, whose sum is sums[b].
    template <class WeightsOf>
    int64_t invert(int64_t num_blocks, double uniform, WeightsOf&& weights_of) const {
        double target = 0;
        for (int64_t b = 0; b < num_blocks; b++) target += sums[b];
        target *= uniform;
        // uniform < 1, but its product with the total can round up to the total: then it is the last block with weight.
        double before = 0, sum = 0;
        int64_t at = 0;
        for (int64_t b = 0; b < num_blocks && sum <= target; b++) {
            if (sums[b] == 0) continue;
            at = b;
            before = sum;
            sum += sums[b];
        }
        // A block's sum, added in another order, can exceed the running sum: then it is the last token with weight.
        const float* block_weights = weights_of(at);
        int64_t found = 0;
        for (int64_t i = 0; i < kDrawBlock && before <= target; i++) {
            if (block_weights[i] == 0) continue;
            found = i;
            before += block_weights[i];
        }
        return at * kDrawBlock + found;
    }

    // The token drawn without filters; call sum_all first.
    int64_t of_all(double uniform) const {
        return invert(blocks, uniform, [&](int64_t b) {
            const float* from = block(b);
            for (int64_t i = 0; i < kDrawBlock; i += 8) weight(V8::load(from + i)).store(weights + i);
            return weights;
        });
    }

    // The token drawn from gathered tokens that weigh at least `least`.
    int64_t of_gathered(int64_t found, float least, double uniform) const {
        const int64_t num_blocks = (found + kDrawBlock - 1) / kDrawBlock;
        std::fill(weights + found, weights + num_blocks * kDrawBlock, 0.0f);
        for (int64_t b = 0; b < num_blocks; b++) {
            Sum sum;
            for (float* place = weights + b * kDrawBlock; place < weights + (b + 1) * kDrawBlock; place += 8) {
                V8 v = kept(V8::load(place), V8::all(least));
                v.store(place);
                sum.add(v);
            }
            sums[b] = sum.total();
        }
        return ids[invert(num_blocks, uniform, [&](int64_t b) { return weights + b * kDrawBlock; })];
    }

    // A logit so far below `logit` that no token under it can weigh as much, whatever the rounding.
    float below(float logit) const {
        const float margin = (1.0f / scale + (most - logit)) * 0x1p-18f;
        return logit - margin - (std::fabs(most) + std::fabs(logit)) * 0x1p-22f;
    }

    // The logit of a weight.
    float logit_of(double weight) const {
        return std::min(most, most + static_cast<float>(std::log2(weight)) / scale);
    }

    // The `rank`-th largest of the blocks' maxima: at least `rank` tokens are as likely.
    float ranked_maximum(int64_t rank) const {
        std::copy(maxima, maxima + blocks, ranked);
        std::nth_element(ranked, ranked + rank - 1, ranked + blocks, std::greater<float>());
        return ranked[rank - 1];
    }

    // Draws the token; -1 if a logit is NaN or infinite, or none is finite.
    int64_t token(double uniform, int64_t top_k, double top_p, float min_p) const {
        if (!std::isfinite(most)) return -1;
        if (top_k >= vocabulary) top_k = 0;
        const double total = top_k == 0 && (top_p < 1.0 || min_p == 0.0f) ? sum_all() : 0.0;
        if (top_k == 0 && top_p == 1.0 && min_p == 0.0f) return of_all(uniform);
        // Logits from which on to gather, tried in order. Only the last is surely low enough to decide what filters
        // keep.
        float logits_from[3];
        for (int i = 0; i < 3; i++) {
            if (top_k > 0) {
                const float lowest = logit_of(top_p < 1.0 ? 0.0 : min_p);
                logits_from[i] = i == 0 ? std::max(lowest, ranked_maximum(std::min(top_k, blocks))) : lowest;
            } else {
                // All tokens lighter than this together weigh less than top_p may cut.
                const double light = (1.0 - top_p) * 0.5 * total / static_cast<double>(vocabulary);
                logits_from[i] = logit_of(std::max<double>(min_p, light * kTrust[i]));
            }
        }
        for (int i = 0;; i++) {
            const int64_t found = gather(below(logits_from[i]));
            const float least = least_weight(found, top_k, top_p, total);
            if (logits_from[i] == logits_from[2] || least >= largest(weight(V8::all(logits_from[i])))) {
                return of_gathered(found, std::max(least, min_p), uniform);
            }
        }
    }
};

inline void draws(const Draws& all, int64_t* tokens) {
    parallel(all.count, [&](int64_t n) {
        Draw draw(all.logits + all.rows[n] * all.vocabulary, all.vocabulary, all.temperatures[n]);
        tokens[n] = draw.token(all.uniforms[n], all.top_k[n], all.top_p[n], all.min_p[n]);
    });
}

}  // namespace octavo
