// The calls of a forward pass as data: a step runs them one after the other, without Python in between.
#pragma once

#include <chrono>

namespace octavo {
namespace {

// As kernels/native/recording.py lays it out. What differs from step to step is behind the pointers, but for the number
// of rows.
struct Call {
    enum Op : int32_t { kLinear, kRopeCacheWrite, kAttention } op;
    int32_t epilogue;  // of a linear
    const void* operation;  // Linear, RopeCacheWrite or AttentionStep
    float* input;
    float* output;
    void* cache;
    const float* turns;
    const int64_t* slots;
    int64_t stride;  // between the tokens of attention's input
    float scale;
};

inline void run(const Call& call, int64_t rows) {
    switch (call.op) {
        case Call::kLinear:
            return octavo_linear(static_cast<const Linear*>(call.operation), call.input, rows, call.output,
                                 call.epilogue);
        case Call::kRopeCacheWrite:
            return octavo_rope_cache_write(static_cast<const RopeCacheWrite*>(call.operation), call.input, rows,
                                           call.turns, call.slots, call.cache);
        case Call::kAttention:
            return octavo_attention(static_cast<const AttentionStep*>(call.operation), call.input, call.stride,
                                    call.cache, call.scale, call.output);
    }
}

// seconds: null, or what each call took, added to what is there.
OCTAVO_EXPORT void octavo_replay(const Call* calls, int64_t count, int64_t rows, double* seconds) {
    if (seconds == nullptr) {
        for (int64_t i = 0; i < count; i++) run(calls[i], rows);
        return;
    }
    using Clock = std::chrono::steady_clock;
    for (int64_t i = 0; i < count; i++) {
        const auto start = Clock::now();
        run(calls[i], rows);
        seconds[i] += std::chrono::duration<double>(Clock::now() - start).count();
    }
}

}  // namespace
}  // namespace octavo
