// Inputs of linears by AMX tiles (tiles.h): rows rounded to bf16, in tiles of 16 rows x 32 inputs.
#pragma once

#include <algorithm>

#include "../../../native/cpp/pool.h"
#include "../../../native/cpp/vec16.h"
#include "../../../elementwise/rms_norm/rms_norm.h"
#include "../../panels.h"
#include "dots_bf16.h"

namespace octavo {

struct TileRows {
    static constexpr int64_t kRows = 16, kInputs = 32, kSize = kRows * kInputs;

    int64_t steps;  // tiles side by side
    bf16* tiles;    // [ceil(rows / kRows)][steps][kRows][kInputs]: zeros fill rows; rows beyond the last are arbitrary

    static int64_t num_steps(int64_t inputs) { return (inputs + kInputs - 1) / kInputs; }

    // Rounds x[rows, inputs], after the norm if the linear has one.
    static TileRows of(const Linear& linear, const float* x, int64_t rows) {
        const int64_t inputs = linear.inputs, steps = num_steps(inputs);
        const int64_t count = (rows + kRows - 1) / kRows * steps;
        const TileRows result = {steps, static_cast<bf16*>(scratch(kSlotRows, count * kSize * sizeof(bf16)))};
        const int64_t rows_per_task = std::max<int64_t>(1, 8192 / inputs);
        parallel((rows + rows_per_task - 1) / rows_per_task, [&](int64_t task) {
            for (int64_t r = task * rows_per_task; r < std::min(rows, (task + 1) * rows_per_task); r++) {
                result.round(linear, x + r * inputs, r);
            }
        });
        return result;
    }

    // The first tile of the row tile with row r.
    bf16* row_tile(int64_t r) const { return tiles + r / kRows * steps * kSize; }

    // Input i of row r.
    bf16* place(int64_t r, int64_t i) const {
        return row_tile(r) + i / kInputs * kSize + r % kRows * kInputs + i % kInputs;
    }

   private:
    void round(const Linear& linear, const float* x, int64_t r) const {
        const float* weight = linear.norm;
        const int64_t inputs = linear.inputs;
        const V16 scale = V16::all(weight ? inverse_rms(x, inputs, linear.eps) : 1.0f);
        for (int64_t i = 0; i < steps * kInputs; i += 16) {
            const int64_t count = std::clamp<int64_t>(inputs - i, 0, 16);
            const __mmask16 some = static_cast<__mmask16>((1u << count) - 1);
            V16 value = {_mm512_maskz_loadu_ps(some, x + i)};
            if (weight) value = value * scale * V16{_mm512_maskz_loadu_ps(some, weight + i)};
            store_as_bf16(value, place(r, i));
        }
    }
};

}  // namespace octavo
