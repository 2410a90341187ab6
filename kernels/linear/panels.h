// The weights of a linear layer as panels of columns, for the vector type V of a path.
#pragma once

#include <cstdint>

#include "../native/cpp/pool.h"
#include "../native/cpp/vec.h"

namespace octavo {

// The same numbers as in kernels/linear/native.py.
enum WeightKind : int32_t { kFloat32, kBfloat16, kInt8, kGroupedInt8, kInt4, kInt4Zeros, kShortBfloat16 };

// Activations of gates; the same numbers as in kernels/linear/native.py.
enum Activation : int32_t { kSilu, kGeluTanh, kClampedSwiglu };

// Matches LinearStruct in kernels/linear/native.py.
struct Linear {
    const void* panels;  // see pack_linear, and the Dots of quantized weights
    const float* bias;   // in the order of the panels' columns, or null
    const float* norm;   // weights of an RMS norm of the input, or null
    float eps;
    int32_t inputs;
    int32_t outputs;  // width of the result: half the weight rows if gated
    int32_t gated;    // the result is activation(first half of the outputs) * second half
    WeightKind weights;
    Activation activation;
    float soft_cap;  // outputs y become soft_cap * tanh(y / soft_cap); 0: no cap. Not for gated layers
};

// Unpacked weights, by weight rows.
struct WeightRows {
    const void* values;      // [rows, inputs]: float, bf16, or int8_t
    const void* scales;      // for int8_t: float [rows], or halves [rows, blocks]
    const uint16_t* minima;  // for int4: halves [rows, blocks]; for int4 with zeros: their negatives

    template <class T>
    const T* row(int64_t r, int64_t inputs) const {
        return static_cast<const T*>(values) + r * inputs;
    }
};

template <class V>
constexpr int kPanel = 2 * V::W;  // columns of a panel

template <class V>
int64_t num_panels(const Linear& linear) {
    const int64_t width = linear.gated ? V::W : kPanel<V>;
    return (linear.outputs + width - 1) / width;
}

// The weight row of column c of panel p, or -1 for padding. A gated panel holds V::W gates, then their V::W ups.
template <class V>
int64_t weight_row(const Linear& linear, int64_t p, int64_t c) {
    if (!linear.gated) {
        int64_t row = p * kPanel<V> + c;
        return row < linear.outputs ? row : -1;
    }
    int64_t row = p * V::W + c % V::W;
    return row >= linear.outputs ? -1 : c < V::W ? row : row + linear.outputs;
}

// Elements per row of inputs, as tiles read it.
template <class A>
int64_t row_size(int64_t inputs) {
    return sizeof(A) == 2 ? (inputs + 1) / 2 * 2 : inputs;
}

// Steps of a panel's sums: for each step a panel holds one element (float32) or two (16 bits) of each column.
template <class T>
int64_t panel_steps(int64_t inputs) {
    return sizeof(T) == 2 ? (inputs + 1) / 2 : inputs;
}

// Elements of a panel of so many steps.
template <class V, class T>
constexpr int64_t panel_size(int64_t steps) {
    return steps * kPanel<V> * (sizeof(T) == 2 ? 2 : 1);
}

template <class V, class T>
int64_t panels_bytes(const Linear& linear) {
    return num_panels<V>(linear) * panel_size<V, T>(panel_steps<T>(linear.inputs)) * sizeof(T);
}

// Packs panel p of rows [weight rows, inputs]: float32 as [input][column], bf16 as [pair of inputs][column][2], with
// zeros where there is no column or no input. steps: inputs or pairs of a panel.
template <class V, class T>
void pack_panel(const Linear& linear, const T* rows, int64_t p, T* panel, int64_t steps) {
    constexpr int kPair = sizeof(T) == 2 ? 2 : 1;
    for (int64_t c = 0; c < kPanel<V>; c++) {
        int64_t row = weight_row<V>(linear, p, c);
        for (int64_t i = 0; i < steps * kPair; i++) {
            T value = row >= 0 && i < linear.inputs ? rows[row * linear.inputs + i] : T{0};
            panel[i / kPair * kPanel<V> * kPair + c * kPair + i % kPair] = value;
        }
    }
}

// Packs all panels: see pack_panel.
template <class V, class T>
void pack_linear(const Linear& linear, const T* rows, T* panels, int64_t steps) {
    parallel(num_panels<V>(linear),
             [&](int64_t p) { pack_panel<V>(linear, rows, p, panels + p * panel_size<V, T>(steps), steps); });
}

}  // namespace octavo
