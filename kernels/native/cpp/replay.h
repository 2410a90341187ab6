// The calls of a forward pass as data: a step runs them in order, without Python in between.
#pragma once

#include <chrono>

namespace octavo {
namespace {

// Matches CallStruct in kernels/native/library.py. Apart from the number of tokens, everything that differs between
// steps is behind the pointers.
struct Call {
    enum Op : int32_t {
        kLinear, kRopeCacheWrite, kAttention, kEmbedding, kCosSinTable, kPlanAttention, kZero, kAddRmsNorm,
        kRecurrent, kNumTokens
    } op;
    int32_t variant;  // a linear's epilogue; 1 for embeddings in bf16
    void* operation;  // Linear, RopeCacheWrite, AttentionStep, CosSinTable, RecurrentLayer, or the weights of a norm
    void* input;
    void* output;
    void* cache;
    const float* cos_sin;
    const float* sinks;  // null: attention has none
    const int64_t* numbers;  // token ids, positions or slots; kNumTokens: how many tokens the calls after it compute
    float* largest;  // linear: null, or receives rows' largest outputs, and `output` their columns
    int64_t size;  // of a row; attention's input: its token stride; a plan: rows of a tile
    float scale;  // of attention and embeddings; a norm's eps
    float soft_cap;  // of attention's scores; 0: none
    float value_scale;  // of attention
    float* mixed;  // recurrent: memory for the convolved channels
};

// Returns the number of tokens of the calls after this one.
inline int64_t run(const Call& call, int64_t tokens) {
    auto *input = static_cast<float*>(call.input), *output = static_cast<float*>(call.output);
    auto* step = static_cast<AttentionStep*>(call.operation);
    switch (call.op) {
        case Call::kLinear: {
            const auto* linear = static_cast<const Linear*>(call.operation);
            if (call.largest) {
                octavo_linear_argmax(linear, input, tokens, static_cast<int64_t*>(call.output), call.largest, nullptr);
            } else {
                octavo_linear(linear, input, tokens, output, call.variant);
            }
            break;
        }
        case Call::kRopeCacheWrite:
            octavo_rope_cache_write(static_cast<const RopeCacheWrite*>(call.operation), input, tokens, call.cos_sin,
                                    call.numbers, call.cache);
            break;
        case Call::kAttention:
            octavo_attention(step, input, call.size, call.cache, call.scale, call.soft_cap, call.sinks,
                             call.value_scale, output);
            break;
        case Call::kEmbedding:
            octavo_embedding(call.numbers, tokens, input, call.size, call.scale, output, call.variant);
            break;
        case Call::kCosSinTable:
            octavo_cos_sin_table(static_cast<const CosSinTable*>(call.operation), call.numbers, tokens, output);
            break;
        case Call::kPlanAttention: octavo_plan_attention(step, tokens, call.size); break;
        case Call::kZero: octavo_zero(output, tokens, call.size); break;
        case Call::kAddRmsNorm:
            octavo_add_rms_norm(input, static_cast<const float*>(call.operation), call.scale, tokens, call.size,
                                output);
            break;
        case Call::kRecurrent:
            octavo_recurrent(static_cast<const RecurrentLayer*>(call.operation), input, tokens,
                             static_cast<float*>(call.cache), call.mixed, output);
            break;
        case Call::kNumTokens: return *call.numbers;
    }
    return tokens;
}

// Runs the calls, as long as they have tokens. seconds: null, or an array to which each call's time is added.
OCTAVO_EXPORT void octavo_replay(const Call* calls, int64_t count, int64_t tokens, double* seconds) {
    if (seconds == nullptr) {
        for (int64_t i = 0; i < count && tokens > 0; i++) tokens = run(calls[i], tokens);
        return;
    }
    using Clock = std::chrono::steady_clock;
    for (int64_t i = 0; i < count && tokens > 0; i++) {
        const auto start = Clock::now();
        tokens = run(calls[i], tokens);
        seconds[i] += std::chrono::duration<double>(Clock::now() - start).count();
    }
}

}  // namespace
}  // namespace octavo
