// For CPUs with AVX512_VNNI but not AVX512_BF16. bf16 is widened in registers.
#include "vec16.h"

#include "../../attention/paged/cpp/attention.h"
#include "../../linear/dots/bf16/short_linear.h"
#include "../../linear/dots/dots_vnni.h"
#include "../../linear/linear.h"

namespace octavo {
using Vector = V16;
using HalfLinear = FloatLinear<V16, float, bf16>;
using ShortHalfLinear = ShortPanels<float>;
template <bool kGrouped>
using Int8Linear = DotsLinear<Int8Dots<kGrouped>>;
template <bool kZeros>
using Int4Linear = DotsLinear<Int4Dots<kZeros>>;
template <class Element>
using HalfAttention = TileAttention<V16, float, bf16, Element>;
}  // namespace octavo

#include "exports.h"
