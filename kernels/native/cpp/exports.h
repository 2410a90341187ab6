// The C functions of a path. A path's file defines Vector; HalfLinear, its linears of bf16 weights; HalfAttention, its
// attention over a cache of bf16 or e4m3; Int8Linear and Int4Linear, its linears of quantized weights.
#pragma once

#include "../../elementwise/embedding/embedding.h"
#include "../../elementwise/silu_mul/gate.h"
#include "../../linear/linear.h"
#include "../../linear/dots/quantized.h"
#include "../../attention/latent/mla_attention.h"
#include "../../attention/packed/packed_attention.h"
#include "../../attention/paged/cpp/attention.h"
#include "../../attention/paged/cpp/work.h"
#include "../../attention/recurrent/recurrent.h"
#include "../../elementwise/rope/cos_sin_table.h"
#include "../../kv_cache/write/rope_cache_write.h"
#include "../../sampling/draw.h"
#include "../../step_inputs/decode_rows.h"

#define OCTAVO_EXPORT extern "C" __attribute__((visibility("default")))

namespace octavo {
namespace {

OCTAVO_EXPORT void octavo_set_threads(int32_t count, bool spins) { set_threads(count, spins); }

OCTAVO_EXPORT void octavo_set_patience(bool is_long) { set_patience(is_long); }

OCTAVO_EXPORT int32_t octavo_set_cores(const int32_t* cores, int32_t count) { return set_cores(cores, count); }

// Calls f(FloatLinear<...>{}) or f(DotsLinear<...>{}), whichever computes linears of these weights.
template <class F>
auto with(WeightKind weights, F&& f) {
    switch (weights) {
        case kFloat32: return f(FloatLinear<Vector, float, float>{});
        case kBfloat16: return f(HalfLinear{});
        case kInt8: return f(Int8Linear<false>{});
        case kGroupedInt8: return f(Int8Linear<true>{});
        case kInt4: return f(Int4Linear<false>{});
        case kInt4Zeros: return f(Int4Linear<true>{});
        case kShortBfloat16: return f(ShortHalfLinear{});
    }
    __builtin_unreachable();
}

// The columns of a panel.
OCTAVO_EXPORT int32_t octavo_panel_width(const Linear* linear) {
    return with(linear->weights, [](auto kind) { return kPanel<typename decltype(kind)::V>; });
}

// The bytes of the panels that octavo_pack writes; 0 if this path has no such weights.
OCTAVO_EXPORT int64_t octavo_packed_bytes(const Linear* linear) {
    return with(linear->weights, [&](auto kind) { return kind.bytes(*linear); });
}

// Packs WeightRows into `panels`, which hold zeros. Returns false if the kind can't hold these weights.
OCTAVO_EXPORT bool octavo_pack(const Linear* linear, const void* values, const void* scales, const uint16_t* minima,
                               void* panels) {
    const WeightRows weights = {values, scales, minima};
    return with(linear->weights, [&](auto kind) { return kind.pack(*linear, weights, static_cast<char*>(panels)); });
}

// Passes the sums to an Output{linear, rest...}.
template <template <class> class Output, class... Rest>
void forward(const Linear& linear, const float* x, int64_t rows, Rest... rest) {
    with(linear.weights, [&](auto kind) {
        kind.forward(linear, x, rows, Output<typename decltype(kind)::V>{linear, rest...});
    });
}

// True if linears of this kind can take their inputs from the last layer in their own form.
template <class Kind, class = void>
constexpr bool kPasses = false;
template <class Kind>
constexpr bool kPasses<Kind, std::void_t<decltype(&Kind::can_pass)>> = true;

// Computes one layer of a pair: see Epilogue. Returns false if it is to be computed like any other.
bool forward_in_pair(const Linear& linear, float* x, int64_t rows, float* y, Epilogue epilogue) {
    const bool is_first = epilogue == kStoreForNext;
    if (!is_first && epilogue != kAddFromLast) return false;
    return with(linear.weights, [&](auto kind) {
        if constexpr (kPasses<decltype(kind)>) {
            if (!kind.can_pass(rows, is_first ? linear.outputs : linear.inputs)) return false;
            if (is_first) {
                kind.store_for_next(linear, x, rows, y);
            } else {
                kind.add_from_last(linear, x, rows, y);
            }
            return true;
        }
        return false;
    });
}

OCTAVO_EXPORT void octavo_linear(const Linear* linear, float* x, int64_t rows, float* y, int32_t epilogue) {
    if (forward_in_pair(*linear, x, rows, y, static_cast<Epilogue>(epilogue))) return;
    forward<StoreOutput>(*linear, x, rows, y, epilogue == kAdd || epilogue == kAddFromLast);
    if (linear->soft_cap > 0) {
        parallel(rows, [&](int64_t r) { soft_cap(y + r * linear->outputs, linear->outputs, linear->soft_cap); });
    }
}

// Fills ids[rows] and values[rows] of each row's largest output: see ArgmaxOutput. A row whose mask leaves no column
// gets -infinity, and column 0.
OCTAVO_EXPORT void octavo_linear_argmax(const Linear* linear, const float* x, int64_t rows, int64_t* ids, float* values,
                                        const uint8_t* const* masks) {
    using Argmax = ArgmaxOutput<Vector>;
    auto* best = reinterpret_cast<uint64_t*>(ids);
    std::fill(best, best + rows, Argmax::kNothing);
    forward<ArgmaxOutput>(*linear, x, rows, best, masks);
    for (int64_t r = 0; r < rows; r++) {
        const bool has_none = best[r] == Argmax::kNothing;
        values[r] = has_none ? -std::numeric_limits<float>::infinity() : Argmax::value(best[r]);
        ids[r] = has_none ? 0 : Argmax::column(best[r]);
    }
}

// Calls f(numbers of the cache).
template <class Memory, class F>
void with_cache(int32_t type, Memory* cache, F&& f) {
    const auto as = [&](auto number) {
        using Number = std::conditional_t<std::is_const_v<Memory>, const decltype(number), decltype(number)>;
        f(static_cast<Number*>(cache));
    };
    switch (static_cast<CacheType>(type)) {
        case kFloat32Cache: return as(float{});
        case kBf16Cache: return as(bf16{});
        case kE4m3Cache: return as(e4m3{});
    }
}

// The class that computes attention over a cache of these numbers.
template <class Element>
struct PagedTile {
    using Type = HalfAttention<Element>;
};
template <>
struct PagedTile<float> {
    using Type = TileAttention<Vector, float, float>;
};

OCTAVO_EXPORT void octavo_rope_cache_write(const RopeCacheWrite* shape, float* qkv, int64_t tokens,
                                           const float* cos_sin, const int64_t* slots, void* cache) {
    with_cache(shape->cache_type, cache, [&](auto* numbers) {
        rope_cache_write(*shape, qkv, tokens, cos_sin, slots, numbers);
    });
}

OCTAVO_EXPORT void octavo_embedding(const int64_t* ids, int64_t tokens, const void* table, int64_t size, float scale,
                                    float* out, int32_t is_bf16) {
    if (is_bf16) return embedding(ids, tokens, static_cast<const bf16*>(table), size, scale, out);
    embedding(ids, tokens, static_cast<const float*>(table), size, scale, out);
}

OCTAVO_EXPORT void octavo_multiply_by_sigmoid(const float* gates, int64_t count, float* x) {
    multiply_by_sigmoid(gates, count, x);
}

OCTAVO_EXPORT void octavo_zero(float* x, int64_t rows, int64_t size) { std::fill(x, x + rows * size, 0.0f); }

OCTAVO_EXPORT void octavo_add_rms_norm(const float* x, const float* weight, float eps, int64_t rows, int64_t size,
                                       float* y) {
    add_rms_norm(x, weight, eps, rows, size, y);
}

OCTAVO_EXPORT void octavo_cos_sin_table(const CosSinTable* rope, const int64_t* positions, int64_t tokens,
                                        float* cos_sin) {
    cos_sin_table(*rope, positions, tokens, cos_sin);
}

OCTAVO_EXPORT void octavo_plan_attention(AttentionStep* step, int64_t tokens, int64_t tile_rows) {
    plan_attention(*step, tokens, tile_rows);
}

OCTAVO_EXPORT void octavo_attention(const AttentionStep* step, const float* q, int64_t stride, const void* cache,
                                    float scale, float soft_cap, const float* sinks, float value_scale,
                                    float* out) {
    const Scores scores = {scale, soft_cap, sinks, value_scale};
    with_cache(step->cache_type, cache, [&](auto* numbers) {
        using Element = std::remove_const_t<std::remove_pointer_t<decltype(numbers)>>;
        using Tile = typename PagedTile<Element>::Type;
        attention<Tile>(*step, q, stride, numbers, scores, out);
    });
}

OCTAVO_EXPORT void octavo_mla_attention(const MlaStep* step, const float* q, const void* cache, float scale,
                                        float* out) {
    if (step->cache_type == kBf16Cache) return mla_attention(*step, q, static_cast<const bf16*>(cache), scale, out);
    mla_attention(*step, q, static_cast<const float*>(cache), scale, out);
}

OCTAVO_EXPORT void octavo_packed_attention(const int32_t* starts, int64_t sequences, const float* q, const float* k,
                                           const float* v, int64_t stride, int64_t heads, int64_t head_size,
                                           float scale, float* out) {
    packed_attention<Vector>(starts, sequences, q, k, v, stride, heads, head_size, scale, out);
}

OCTAVO_EXPORT void octavo_recurrent(const RecurrentLayer* layer, const float* x, int64_t tokens, float* cache,
                                    float* mixed, float* y) {
    if (layer->rule == kDelta) return recurrent<kDelta>(*layer, x, tokens, cache, mixed, y);
    recurrent<kMamba2>(*layer, x, tokens, cache, mixed, y);
}

OCTAVO_EXPORT void octavo_draw(const Draws* all, int64_t* tokens) { draws(*all, tokens); }

OCTAVO_EXPORT int64_t octavo_begin_decodes(const DecodeRows* all, const Decodes* step) {
    return begin_decodes(*all, *step);
}

OCTAVO_EXPORT int64_t octavo_end_decodes(const DecodeRows* all, const Decodes* step, const int64_t* tokens,
                                         const float* logits, const SampledTokens* said) {
    return end_decodes(*all, *step, tokens, logits, *said);
}

}  // namespace
}  // namespace octavo

#include "replay.h"
