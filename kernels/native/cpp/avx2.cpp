// For CPUs with AVX2 and FMA. Linears of bf16 or quantized weights multiply integers (see dots_fixed.h and
// dots_avx2.h); all other arithmetic is float32.
#include "../../attention/paged/cpp/attention.h"
#include "../../linear/dots/dots_avx2.h"
#include "../../linear/dots/bf16/dots_fixed.h"
#include "../../linear/linear.h"

namespace octavo {
using Vector = V8;
using HalfLinear = DotsLinear<FixedDots>;
using ShortHalfLinear = NoLinear<Vector>;
template <bool kGrouped>
using Int8Linear = DotsLinear<Int8Dots<kGrouped>>;
template <bool kZeros>
using Int4Linear = DotsLinear<Int4Dots<kZeros>>;
template <class Element>
using HalfAttention = TileAttention<V8, float, bf16, Element>;
}  // namespace octavo

#include "exports.h"
