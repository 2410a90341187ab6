"""How a kernel ships: everything that decides what code a GPU runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Compute capabilities: A100, L40S and RTX 40, H100 and H200.
ARCHS = (80, 89, 90)
# Those whose instructions convert and multiply e4m3.
FP8_ARCHS = (89, 90)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBuild:
    """One configuration that is launched in production, for compiling it without a GPU."""

    # Says which configuration, unique within the op: "decode-bf16-d128".
    name: str
    # What @triton.jit made.
    fn: Any
    # Triton's type of each argument that is no constexpr: "*bf16", "*fp8e4nv", "*i32", "i32", "fp32".
    signature: Mapping[str, str]
    # Of all others; None for a pointer that is None at launch.
    constexprs: Mapping[str, Any]
    num_warps: int
    num_stages: int
    # Integer arguments that are multiples of 16 at launch, such as strides of tensors with whole rows; Triton reads
    # more numbers at once then. Pointers always are.
    multiples_of_16: tuple[str, ...] = ()
    # Whether a dot of it must become Hopper's wgmma.
    expects_wgmma: bool = False
    # The only shape of it that there may be, such as "m64n128k16", for builds whose results have the same bits.
    wgmma_shape: str = ""
    # Whether it must read 16 bytes a thread at a time, and write as many, or 8 where 2 bytes became 1: a mask or a
    # stride that Triton cannot see through takes that away without a word.
    expects_vectors: bool = False
    archs: tuple[int, ...] = ARCHS
