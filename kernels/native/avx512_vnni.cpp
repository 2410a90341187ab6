// For CPUs with AVX512_VNNI but not AVX512_BF16. bf16 is widened in registers.
#include "vec16.h"

#include "../linear/dots_vnni.h"

namespace octavo {
using Vector = V16;
using HalfInput = float;
using HalfWeight = bf16;
using HalfQuery = float;
}  // namespace octavo

#include "exports.h"
