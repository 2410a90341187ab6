// For CPUs with AVX2 and FMA. bf16 is widened in registers; all arithmetic is float32.
#include "vec.h"

namespace octavo {
using Vector = V8;
using HalfInput = float;
}  // namespace octavo

#include "exports.h"
