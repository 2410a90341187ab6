// Layers that carry a state from token to token: a short causal convolution, a linear recurrence over a matrix per head,
// and a gated norm. Mamba-2 (arXiv 2405.21060) and the gated delta rule (arXiv 2412.06464).
//
// The state of a sequence is kept in its blocks: a block has one slot per layer, with the state after the last token so
// far computed in the block. A token continues the state of the token before it, in order, one by one. So the result
// depends only on the tokens before: not on the batch, the chunk of the prompt, the block size or the number of threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "../../elementwise/rms_norm/rms_norm.h"
#include "../../native/cpp/pool.h"
#include "../../native/cpp/vec.h"

namespace octavo {

// Matches _StepStruct in kernels/attention/recurrent/native.py; the arrays are those of one step.
struct RecurrentStep {
    const int32_t* query_starts;
    const int32_t* context_lens;
    const int32_t* block_tables;
    int64_t table_stride;
    int32_t block_size;
    int32_t cache_type;  // for other layers
};

enum Rule : int32_t { kMamba2, kDelta };

constexpr int64_t kMostNumbers = 512;  // of a head's keys, and of its values
constexpr int64_t kMostTaps = 8;       // of a convolution

// Matches _LayerStruct in kernels/attention/recurrent/native.py.
//
// A token's input is [channels | gate | steps | betas]; its channels are [values | keys | queries], convolved. Values,
// gates and results are [heads][value_size]; keys and queries [groups][key_size], each for heads / groups heads; steps
// and, for the delta rule, betas have one number a head.
// A slot is [taps - 1][padded channels] inputs of the convolution, oldest first, then [heads][key_size][padded values].
struct RecurrentLayer {
    const RecurrentStep* step;
    const float* taps;       // [num_taps][padded channels], oldest input first
    const float* bias;       // [padded channels]
    const float* rate;       // [heads]: a state decays by e^(rate * step)
    const float* step_bias;  // [heads]
    const float* skip;       // [heads]: factor of the values that are added to the result; null: none
    const float* norm;       // [heads * value_size]
    int32_t rule, heads, groups, key_size, value_size, num_taps;
    int32_t norm_size;       // numbers of a result that are normed together
    float eps, least_step, most_step;

    static int64_t padded(int64_t size) { return (size + 7) / 8 * 8; }
    int64_t results() const { return int64_t{heads} * value_size; }
    int64_t keys() const { return int64_t{groups} * key_size; }
    int64_t channels() const { return results() + 2 * keys(); }
    int64_t width() const { return channels() + results() + heads * (rule == kDelta ? 2 : 1); }
    int64_t window() const { return (num_taps - 1) * padded(channels()); }
    int64_t matrix() const { return key_size * padded(value_size); }
    int64_t slot() const { return window() + heads * matrix(); }
};

// Up to 8 of the numbers at p; the others are 0.
inline V8 load_part(const float* p, int64_t count) {
    if (count >= 8) return V8::load(p);
    alignas(32) float part[8] = {};
    std::memcpy(part, p, count * sizeof(float));
    return V8::load(part);
}

inline void store_part(V8 v, float* p, int64_t count) {
    if (count >= 8) return v.store(p);
    alignas(32) float part[8];
    v.store(part);
    std::memcpy(p, part, count * sizeof(float));
}

// Calls run(slot, before, first, end) for each run of a row's tokens within one block, rows in order: a row may continue
// the blocks that a row before it fills. slot: the block's, which holds the state after the token before if `before` is
// the same; else `before` is the slot to continue, or null at a sequence's start.
template <class F>
void for_each_run(const RecurrentStep& step, int64_t tokens, int64_t slot_size, float* cache, F&& run) {
    for (int64_t row = 0; step.query_starts[row] < tokens; row++) {
        const int32_t* table = step.block_tables + row * step.table_stride;
        const int64_t end = step.query_starts[row + 1], context = step.context_lens[row];
        for (int64_t token = step.query_starts[row]; token < end;) {
            const int64_t position = context - (end - token), index = position / step.block_size;
            const int64_t stop = std::min(end, token + (index + 1) * step.block_size - position);
            float* slot = cache + table[index] * slot_size;
            float* before = position % step.block_size ? slot : position ? cache + table[index - 1] * slot_size : nullptr;
            run(slot, before, token, stop);
            token = stop;
        }
    }
}

// mixed[tokens][padded channels] = silu of the convolved channels of x[tokens][width].
inline void convolve(const RecurrentLayer& layer, const float* x, int64_t tokens, float* cache, float* mixed) {
    const int64_t channels = layer.channels(), padded = layer.padded(channels), width = layer.width();
    const int64_t at_once = 64, history = layer.num_taps - 1;
    parallel((padded + at_once - 1) / at_once, [&](int64_t task) {
        for (int64_t c = task * at_once; c < std::min(padded, (task + 1) * at_once); c += 8) {
            V8 taps[kMostTaps], window[kMostTaps];
            for (int64_t i = 0; i <= history; i++) taps[i] = V8::load(layer.taps + i * padded + c);
            const V8 bias = V8::load(layer.bias + c);
            for_each_run(*layer.step, tokens, layer.slot(), cache,
                         [&](float* slot, const float* before, int64_t first, int64_t end) {
                for (int64_t i = 0; i < history; i++) {
                    window[i] = before ? V8::load(before + i * padded + c) : V8::zero();
                }
                for (int64_t t = first; t < end; t++) {
                    window[history] = load_part(x + t * width + c, channels - c);
                    V8 sum = bias;
                    for (int64_t i = 0; i <= history; i++) sum = fma(taps[i], window[i], sum);
                    silu(sum).store(mixed + t * padded + c);
                    for (int64_t i = 0; i < history; i++) window[i] = window[i + 1];
                }
                for (int64_t i = 0; i < history; i++) window[i].store(slot + i * padded + c);
            });
        }
    });
}

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// to = from * (scale / its length)
inline void scaled_to_length(const float* from, int64_t size, float scale, float* to) {
    const float factor = scale / std::sqrt(sum_of_squares(from, size) + 1e-6f);
    for (int64_t i = 0; i < size; i++) to[i] = from[i] * factor;
}

// One token of one head, for N vectors of its values: state = decay * state + key x added, where the delta rule adds what
// is new of the value; y = the query's sum over the state. The state is read in memory order.
template <Rule R, int N>
void advance(float* state, const float* key, const float* query, int64_t keys, int64_t stride, float decay, float beta,
             const float* value, float* y) {
    const V8 shrink = V8::all(decay);
    V8 added[N], sum[N];
    for (int v = 0; v < N; v++) {
        added[v] = V8::load(value + 8 * v);
        sum[v] = V8::zero();
    }
    if constexpr (R == kDelta) {
        for (int64_t k = 0; k < keys; k++) {
            const V8 factor = V8::all(key[k]);
            for (int v = 0; v < N; v++) sum[v] = fma(V8::load(state + k * stride + 8 * v) * shrink, factor, sum[v]);
        }
        for (int v = 0; v < N; v++) {
            added[v] = (added[v] - sum[v]) * V8::all(beta);
            sum[v] = V8::zero();
        }
    }
    for (int64_t k = 0; k < keys; k++) {
        const V8 own = V8::all(key[k]), asked = V8::all(query[k]);
        for (int v = 0; v < N; v++) {
            float* place = state + k * stride + 8 * v;
            const V8 next = fma(own, added[v], V8::load(place) * shrink);
            next.store(place);
            sum[v] = fma(next, asked, sum[v]);
        }
    }
    for (int v = 0; v < N; v++) sum[v].store(y + 8 * v);
}

// One token of one head. values: in whole vectors.
template <Rule R>
void advance(float* state, const float* key, const float* query, int64_t keys, int64_t values, float decay, float beta,
             const float* value, float* y) {
    int64_t v = 0;
    const auto next = [&](auto count) {
        advance<R, count()>(state + v, key, query, keys, values, decay, beta, value + v, y + v);
        v += 8 * count();
    };
    while (v + 32 <= values) next(std::integral_constant<int, 4>{});
    while (v < values) next(std::integral_constant<int, 1>{});
}

// y[tokens][heads][value_size]: each token's result, before the norm.
template <Rule R>
void recur(const RecurrentLayer& layer, const float* x, int64_t tokens, float* cache, const float* mixed, float* y) {
    const int64_t keys = layer.key_size, size = layer.value_size, values = layer.padded(size), matrix = layer.matrix();
    const int64_t width = layer.width(), padded = layer.padded(layer.channels());
    parallel(layer.heads, [&](int64_t head) {
        alignas(32) float key[kMostNumbers], query[kMostNumbers], value[kMostNumbers], result[kMostNumbers];
        const int64_t group = head / (layer.heads / layer.groups);
        const int64_t key_place = layer.results() + group * keys, query_place = key_place + layer.keys();
        const int64_t steps = layer.channels() + layer.results() + head;
        for_each_run(*layer.step, tokens, layer.slot(), cache,
                     [&](float* slot, const float* before, int64_t first, int64_t end) {
            const int64_t place = layer.window() + head * matrix;
            float* state = slot + place;
            if (!before) {
                std::fill(state, state + matrix, 0.0f);
            } else if (before != slot) {
                std::copy(before + place, before + place + matrix, state);
            }
            for (int64_t t = first; t < end; t++) {
                const float *row = mixed + t * padded, *v = row + head * size, *scalars = x + t * width + steps;
                float step = softplus(scalars[0] + layer.step_bias[head]), beta = 0;
                step = std::min(std::max(step, layer.least_step), layer.most_step);
                const float decay = std::exp(layer.rate[head] * step);
                const float factor = R == kMamba2 ? step : 1.0f;
                for (int64_t i = 0; i < size; i++) value[i] = v[i] * factor;
                std::fill(value + size, value + values, 0.0f);
                if constexpr (R == kDelta) {
                    beta = 1.0f / (1.0f + std::exp(-scalars[layer.heads]));
                    scaled_to_length(row + key_place, keys, 1.0f, key);
                    scaled_to_length(row + query_place, keys, 1.0f / std::sqrt(static_cast<float>(keys)), query);
                    advance<R>(state, key, query, keys, values, decay, beta, value, result);
                } else {
                    advance<R>(state, row + key_place, row + query_place, keys, values, decay, beta, value, result);
                }
                float* out = y + t * layer.results() + head * size;
                const float skip = layer.skip ? layer.skip[head] : 0.0f;
                for (int64_t i = 0; i < size; i++) out[i] = layer.skip ? std::fma(skip, v[i], result[i]) : result[i];
            }
        });
    });
}

// Norms y[tokens][heads][value_size] in place. Mamba-2 gates what is normed, the delta rule what comes out.
template <Rule R>
void gated_norm(const RecurrentLayer& layer, const float* x, int64_t tokens, float* y) {
    const int64_t results = layer.results(), size = layer.norm_size, at_once = 8;
    parallel((tokens + at_once - 1) / at_once, [&](int64_t task) {
        for (int64_t t = task * at_once; t < std::min(tokens, (task + 1) * at_once); t++) {
            const float* gates = x + t * layer.width() + layer.channels();
            for (int64_t first = 0; first < results; first += size) {
                float* part = y + t * results + first;
                if constexpr (R == kMamba2) {
                    for (int64_t i = 0; i < size; i += 8) {
                        const V8 gate = silu(load_part(gates + first + i, size - i));
                        store_part(load_part(part + i, size - i) * gate, part + i, size - i);
                    }
                }
                const V8 scale = V8::all(inverse_rms(part, size, layer.eps));
                for (int64_t i = 0; i < size; i += 8) {
                    V8 normed = load_part(part + i, size - i) * scale * load_part(layer.norm + first + i, size - i);
                    if constexpr (R == kDelta) normed = normed * silu(load_part(gates + first + i, size - i));
                    store_part(normed, part + i, size - i);
                }
            }
        }
    });
}

template <Rule R>
void recurrent(const RecurrentLayer& layer, const float* x, int64_t tokens, float* cache, float* mixed, float* y) {
    convolve(layer, x, tokens, cache, mixed);
    recur<R>(layer, x, tokens, cache, mixed, y);
    gated_norm<R>(layer, x, tokens, y);
}

}  // namespace octavo
