// For CPUs with AVX512_BF16: linears of bf16 weights round their inputs to bf16 and sum in float32. What is no linear, or
// one of quantized weights, is as for AVX2.
#include "../linear/dots_avx2.h"

namespace octavo {
using Vector = V16;
using HalfInput = bf16;
using HalfWeight = bf16;
}  // namespace octavo

#include "exports.h"
