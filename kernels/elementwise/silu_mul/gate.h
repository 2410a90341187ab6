// The sigmoid of gates.
#pragma once

#include <cstring>

#include "../../native/cpp/pool.h"
#include "../../native/cpp/vec.h"

namespace octavo {

// x[count] *= sigmoid(gates[count])
inline void multiply_by_sigmoid(const float* gates, int64_t count, float* x) {
    const int64_t at_once = 4096;
    parallel((count + at_once - 1) / at_once, [&](int64_t task) {
        const V8 one = V8::all(1.0f);
        const int64_t end = task * at_once + at_once < count ? task * at_once + at_once : count;
        for (int64_t i = task * at_once; i < end; i += 8) {
            const int64_t size = end - i < 8 ? end - i : 8;
            alignas(32) float gate[8] = {}, value[8] = {};
            std::memcpy(gate, gates + i, size * sizeof(float));
            std::memcpy(value, x + i, size * sizeof(float));
            const V8 sigmoid = one / (one + exp2(V8::load(gate) * V8::all(-kLog2E)));
            (V8::load(value) * sigmoid).store(value);
            std::memcpy(x + i, value, size * sizeof(float));
        }
    });
}

}  // namespace octavo
