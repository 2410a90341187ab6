// For CPUs with AVX512_BF16 and AVX512_VNNI. Factors of bf16 weights and KV are rounded to bf16; sums are float32.
#include "vec16_bf16.h"

#include "../../attention/paged/cpp/attention.h"
#include "../../linear/dots/dots_vnni.h"
#include "../../linear/dots/bf16/rounded_linear.h"

namespace octavo {
using Vector = V16;
using HalfLinear = RoundedLinear<WholePanels>;
using ShortHalfLinear = RoundedLinear<ShortPanels<bf16>>;
template <bool kGrouped>
using Int8Linear = DotsLinear<Int8Dots<kGrouped>>;
template <bool kZeros>
using Int4Linear = DotsLinear<Int4Dots<kZeros>>;
template <class Element>
using HalfAttention = TileAttention<V16, bf16, bf16, Element>;
}  // namespace octavo

#include "exports.h"
