// The functions of a path, as C. A path's file defines Vector, and HalfInput and HalfWeight, what its linears of bf16
// weights multiply.
#pragma once

#include "../linear/linear.h"
#include "../paged_attention/attention.h"
#include "../paged_attention/work.h"
#include "../rope_cache_write/rope_cache_write.h"

#define OCTAVO_EXPORT extern "C" __attribute__((visibility("default")))

namespace octavo {
namespace {

OCTAVO_EXPORT void octavo_set_threads(int32_t count, bool spins) { set_threads(count, spins); }

OCTAVO_EXPORT int32_t octavo_set_cores(const int32_t* cores, int32_t count) { return set_cores(cores, count); }

OCTAVO_EXPORT void octavo_announce() { announce(); }

OCTAVO_EXPORT int32_t octavo_panel_width() { return kPanel<Vector>; }

// Of the panels that octavo_pack writes.
OCTAVO_EXPORT int64_t octavo_packed_bytes(const Linear* linear) {
    const int64_t steps = linear->bf16_weights ? panel_steps<HalfWeight>(linear->inputs) : linear->inputs;
    return num_panels<Vector>(*linear) * steps * kPanel<Vector> * 4;
}

OCTAVO_EXPORT void octavo_pack(const Linear* linear, const void* rows, void* panels) {
    if (linear->bf16_weights) {
        pack_linear<Vector>(*linear, static_cast<const bf16*>(rows), static_cast<HalfWeight*>(panels));
    } else {
        pack_linear<Vector>(*linear, static_cast<const float*>(rows), static_cast<float*>(panels));
    }
}

template <class Output>
void forward(const Linear& linear, const float* x, int64_t rows, const Output& output) {
    if (linear.bf16_weights) {
        linear_forward<Vector, HalfInput, HalfWeight>(linear, x, rows, output);
    } else {
        linear_forward<Vector, float, float>(linear, x, rows, output);
    }
}

OCTAVO_EXPORT void octavo_linear(const Linear* linear, const float* x, int64_t rows, float* y, int32_t epilogue) {
    forward(*linear, x, rows, StoreOutput<Vector>{*linear, y, static_cast<Epilogue>(epilogue)});
}

// ids[rows] and values[rows] of each row's largest output: see ArgmaxOutput.
OCTAVO_EXPORT void octavo_linear_argmax(const Linear* linear, const float* x, int64_t rows, int64_t* ids,
                                        float* values) {
    using Argmax = ArgmaxOutput<Vector>;
    auto* best = reinterpret_cast<uint64_t*>(ids);
    std::fill(best, best + rows, Argmax::kNothing);
    forward(*linear, x, rows, Argmax{*linear, best});
    for (int64_t r = 0; r < rows; r++) {
        values[r] = Argmax::value(best[r]);
        ids[r] = Argmax::column(best[r]);
    }
}

OCTAVO_EXPORT void octavo_rope_cache_write(const RopeCacheWrite* shape, float* qkv, int64_t tokens, const float* turns,
                                           const int64_t* slots, void* cache) {
    if (shape->bf16_cache) {
        rope_cache_write(*shape, qkv, tokens, turns, slots, static_cast<bf16*>(cache));
    } else {
        rope_cache_write(*shape, qkv, tokens, turns, slots, static_cast<float*>(cache));
    }
}

OCTAVO_EXPORT void octavo_plan_attention(AttentionStep* step, int64_t rows, int64_t tile_rows) {
    plan_attention(*step, rows, tile_rows);
}

OCTAVO_EXPORT void octavo_attention(const AttentionStep* step, const float* q, int64_t stride, const void* cache,
                                    float scale, float* out) {
    if (step->bf16_cache) {
        attention(*step, q, stride, static_cast<const bf16*>(cache), scale, out);
    } else {
        attention(*step, q, stride, static_cast<const float*>(cache), scale, out);
    }
}

}  // namespace
}  // namespace octavo

#include "replay.h"
