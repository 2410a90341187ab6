"""A shipped kernel: everything that determines the code that a GPU runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Compute capabilities: A100, RTX 30, L40S and RTX 40, H100 and H200, B200, RTX 50.
ARCHS = (80, 86, 89, 90, 100, 120)
# Architectures with instructions that convert and multiply e4m3.
FP8_ARCHS = (89, 90, 100, 120)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBuild:
    """One configuration used in production, described so that it compiles without a GPU."""

    # Names the configuration, unique within the op: "decode-bf16-d128".
    name: str
    # The result of @triton.jit.
    fn: Any
    # Triton's type of each argument that is not a constexpr: "*bf16", "*fp8e4nv", "*i32", "i32", "fp32".
    signature: Mapping[str, str]
    # The values of all other arguments; None for a pointer that is None at launch.
    constexprs: Mapping[str, Any]
    num_warps: int
    num_stages: int
    # Integer arguments that are multiples of 16 at launch, such as strides of tensors with whole rows; they let Triton
    # read more numbers at once. Pointers always are multiples of 16.
    multiples_of_16: tuple[str, ...] = ()
    # True if one of its dots must become Hopper's wgmma.
    expects_wgmma: bool = False
    # The only wgmma shape allowed, such as "m64n128k16", for builds whose results must have the same bits.
    wgmma_shape: str = ""
    # True if a thread must read 16 bytes at a time, and write 16, or 8 where 2 bytes become 1. A mask or a stride that
    # Triton cannot analyse silently prevents this.
    expects_vectors: bool = False
    archs: tuple[int, ...] = ARCHS
