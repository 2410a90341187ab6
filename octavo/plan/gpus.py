"""GPUs by name, as their vendors' data sheets give them: dense rates, without structured sparsity."""

import difflib
from dataclasses import dataclass

from octavo.plan.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device. Bytes and bytes a second are decimal, as on a data sheet."""

    name: str
    memory: float
    # Bytes a second of its memory.
    bandwidth: float
    # Operations a second of the matrix units, accumulating in float32. fp8 is None where there are no such units.
    bf16_flops: float
    fp8_flops: float | None
    # Bytes a second in one direction, to the other GPUs of its host together; None: it has no such links.
    link: float | None
    # Bytes a second in one direction.
    pcie: float


def _gpu(name: str, gb: float, gb_s: float, bf16: float, fp8: float | None, link: float | None, pcie: float) -> Gpu:
    """gb, gb_s: memory; bf16, fp8: TFLOP/s; link, pcie: GB/s in one direction (half of what data sheets add up)."""
    return Gpu(
        name=name,
        memory=gb * 1e9,
        bandwidth=gb_s * 1e9,
        bf16_flops=bf16 * 1e12,
        fp8_flops=fp8 and fp8 * 1e12,
        link=link and link * 1e9,
        pcie=pcie * 1e9,
    )


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("B200", 180, 7700, 2250, 4500, 900, 64),
        _gpu("H200", 141, 4800, 989, 1979, 450, 64),
        _gpu("H100 SXM", 80, 3350, 989, 1979, 450, 64),
        _gpu("H100 NVL", 94, 3900, 835, 1671, 300, 64),
        _gpu("H100 PCIe", 80, 2000, 756, 1513, 300, 64),
        _gpu("A100 80GB", 80, 2039, 312, None, 300, 32),
        _gpu("A100 40GB", 40, 1555, 312, None, 300, 32),
        _gpu("L40S", 48, 864, 362, 733, None, 32),
        _gpu("L4", 24, 300, 121, 242, None, 32),
        _gpu("A10", 24, 600, 125, None, None, 32),
        _gpu("RTX 6000 Ada", 48, 960, 364, 728, None, 32),
        _gpu("RTX 5090", 32, 1792, 209, 419, None, 64),
        _gpu("RTX 4090", 24, 1008, 165, 330, None, 32),
        _gpu("RTX 3090", 24, 936, 71, None, 56, 32),
        _gpu("MI300X", 192, 5300, 1307, 2615, 448, 64),
        _gpu("MI325X", 256, 6000, 1307, 2615, 448, 64),
        _gpu("MI355X", 288, 8000, 2300, 4600, 538, 64),
    )
}
# What people also call them.
_ALIASES = {"h100": "H100 SXM", "a100": "A100 80GB", "4090": "RTX 4090", "5090": "RTX 5090", "3090": "RTX 3090"}


def find_gpu(name: str) -> Gpu:
    """The GPU of this name; case, spaces and dashes don't matter. Raises PlanError, which lists those known."""

    def plain(text: str) -> str:
        return "".join(letter for letter in text.lower() if letter.isalnum())

    by_plain_name = {plain(known): gpu for known, gpu in GPUS.items()}
    by_plain_name |= {alias: GPUS[known] for alias, known in _ALIASES.items()}
    if found := by_plain_name.get(plain(name)):
        return found
    close = difflib.get_close_matches(plain(name), by_plain_name, n=1)
    hint = f" (did you mean {by_plain_name[close[0]].name}?)" if close else ""
    raise PlanError(f"--gpu {name!r} is not known{hint}; known are {', '.join(GPUS)}")
