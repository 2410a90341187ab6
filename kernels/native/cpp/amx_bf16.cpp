// For CPUs with AMX for bf16. Linears of bf16 weights and attention over a cache of bf16 or e4m3 multiply
// tiles; the rest is as with AVX512_BF16.
#include "vec16.h"

#include "../../attention/paged/cpp/amx_attention.h"
#include "../../linear/dots/dots_vnni.h"
#include "../../linear/dots/bf16/dots_bf16.h"
#include "../../linear/dots/tile_dots.h"
#include "../../linear/dots/bf16/tiles.h"
#include "../../linear/linear.h"

namespace octavo {
using Vector = V16;
using HalfLinear = TileLinear;
using ShortHalfLinear = NoLinear<Vector>;
template <bool kGrouped>
using Int8Linear = DotsLinear<TileDots<Int8Dots<kGrouped, kTileGroup>>>;
template <bool kZeros>
using Int4Linear = DotsLinear<TileDots<Int4Dots<kZeros, kTileGroup>>>;
template <class Element>
using HalfAttention = AmxAttention<Element>;
}  // namespace octavo

#include "exports.h"
