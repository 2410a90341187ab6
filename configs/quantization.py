"""The kinds of quantization of linear layers: one record a kind, read by options, workers, plans and `octavo doctor`.

worker/weights/quantization/kinds.py has what a worker computes with each.
"""

from dataclasses import dataclass
from typing import Literal

# Types for pydantic and the type checker; a test keeps them equal to KINDS.
QuantizationName = Literal["int8", "fp8", "int4"]
Quantization = Literal["none", "int8", "fp8", "int4"]
# auto: what the checkpoint was made for.
QuantizationOption = Literal["auto", "none", "int8", "fp8", "int4"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationKind:
    """How a weight of [outputs, inputs] is stored. about: for the option's help."""

    name: QuantizationName
    bits: int
    # So many inputs of an output share scale_bytes of scales and minima; 0: all of them.
    group: int = 0
    scale_bytes: int = 4
    on_cpus: bool = False
    on_gpus: bool = False
    about: str

    @property
    def param_bytes(self) -> float:
        """Bytes of a parameter, with its share of a group's scales; one scale per output is negligible."""
        return self.bits / 8 + (self.scale_bytes / self.group if self.group else 0.0)

    def row_bytes(self, num_inputs: int) -> int:
        """Bytes of one output's weights and scales."""
        num_groups = -(-num_inputs // self.group) if self.group else 1
        return self.bits * num_inputs // 8 + self.scale_bytes * num_groups


KINDS: dict[str, QuantizationKind] = {
    kind.name: kind
    for kind in (
        QuantizationKind(name="int8", bits=8, on_cpus=True, about="weights in 8 bits, one scale per output."),
        QuantizationKind(
            name="fp8",
            bits=8,
            on_gpus=True,
            about="e4m3, one scale per output, or the checkpoint's scales; the head stays as it is.",
        ),
        QuantizationKind(
            name="int4",
            bits=4,
            group=32,
            on_cpus=True,
            on_gpus=True,
            about="in 4 bits, a scale and a minimum per 32 weights; the output head in 8.",
        ),
    )
}


def offered(*, on_gpu: bool) -> tuple[Quantization, ...]:
    """The kinds that workers on such a device compute with, `none` first."""
    return ("none", *(kind.name for kind in KINDS.values() if (kind.on_gpus if on_gpu else kind.on_cpus)))


def option_help() -> str:
    """The kinds, one a line, for the help of an option."""
    only = {(True, False): " (CPUs only)", (False, True): " (GPUs only)"}
    return " ".join(f"{k.name}{only.get((k.on_cpus, k.on_gpus), '')}: {k.about}" for k in KINDS.values())
