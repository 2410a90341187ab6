"""`compilation_config`: the use of CUDA graphs, with vLLM's names for it.

Octavo has kernels of its own and does not call torch.compile, so that of vLLM's compilation only the graphs are left:

| as vLLM writes it | level here |
|---|---|
| compilation_config=0, 1, 2; CompilationLevel.NO_COMPILATION, DYNAMO_AS_IS, DYNAMO_ONCE | NONE |
| compilation_config=3; CompilationLevel.PIECEWISE | PIECEWISE |
| mode=CompilationMode.NONE, STOCK_TORCH_COMPILE, DYNAMO_TRACE_ONCE, without a cudagraph_mode | NONE |
| mode=CompilationMode.VLLM_COMPILE, without a cudagraph_mode | FULL |
| cudagraph_mode=CUDAGraphMode.NONE | NONE |
| cudagraph_mode=CUDAGraphMode.PIECEWISE | PIECEWISE |
| cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE, FULL, FULL_DECODE_ONLY | FULL |

FULL is one graph for a step that only decodes, and pieces for all other steps. vLLM's FULL would have one graph for
those, too, and its FULL_DECODE_ONLY none: with Octavo both have the pieces. As in vLLM, a cudagraph_mode decides
whatever level or mode say.
"""

from collections.abc import Mapping
from enum import Enum, IntEnum
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

GraphLevel = Literal["NONE", "PIECEWISE", "FULL"]
Names = TypeVar("Names", bound=Enum)


class CompilationLevel(IntEnum):
    """vLLM's levels, by which its guides set `compilation_config`."""

    NO_COMPILATION = 0
    DYNAMO_AS_IS = 1
    DYNAMO_ONCE = 2
    PIECEWISE = 3


class CompilationMode(IntEnum):
    """The names that vLLM has given its levels since."""

    NONE = 0
    STOCK_TORCH_COMPILE = 1
    DYNAMO_TRACE_ONCE = 2
    VLLM_COMPILE = 3


class CUDAGraphMode(Enum):
    """vLLM's modes of CUDA graphs."""

    NONE = "NONE"
    PIECEWISE = "PIECEWISE"
    FULL = "FULL"
    FULL_DECODE_ONLY = "FULL_DECODE_ONLY"
    FULL_AND_PIECEWISE = "FULL_AND_PIECEWISE"


_OF_GRAPHS: dict[CUDAGraphMode, GraphLevel] = {
    CUDAGraphMode.NONE: "NONE",
    CUDAGraphMode.PIECEWISE: "PIECEWISE",
    CUDAGraphMode.FULL: "FULL",
    CUDAGraphMode.FULL_DECODE_ONLY: "FULL",
    CUDAGraphMode.FULL_AND_PIECEWISE: "FULL",
}


class CompilationConfig(BaseModel):
    """The use of CUDA graphs for steps. Immutable. Takes vLLM's `mode` and `cudagraph_mode` in place of `level`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # NONE: Python launches every kernel. PIECEWISE: graphs of the parts between the layers' attention. FULL: one graph
    # for a step that only decodes, pieces for all others.
    level: GraphLevel = "FULL"
    # Step sizes in tokens to capture graphs for. A step is padded to the next size; above the last one it runs without
    # graphs. Empty: 1, 2, 4, multiples of 8 up to 256, of 16 up to 512, as far as the other options allow steps that
    # large, and the largest step that they allow.
    cudagraph_capture_sizes: tuple[Annotated[int, Field(ge=1, le=65_536)], ...] = ()

    def __init__(
        self,
        level: GraphLevel | CompilationLevel | int | None = None,
        *,
        mode: CompilationMode | int | str | None = None,
        cudagraph_mode: CUDAGraphMode | str | None = None,
        **fields: Any,
    ):
        """Raises pydantic.ValidationError, a ValueError."""
        named = {"level": level, "mode": mode, "cudagraph_mode": cudagraph_mode}
        super().__init__(**{name: value for name, value in named.items() if value is not None}, **fields)

    @model_validator(mode="before")
    @classmethod
    def _from_names(cls, given: object) -> object:
        """Makes a level of vLLM's names, and of an int."""
        if isinstance(given, int) and not isinstance(given, bool):
            given = {"level": given}
        if not isinstance(given, Mapping):
            return given
        fields = dict(given)
        mode, graphs, level = (fields.pop(name, None) for name in ("mode", "cudagraph_mode", "level"))
        if mode is not None and level is not None:
            raise ValueError(f"level={level!r} and mode={mode!r} are two names of one setting: give one of them")
        if isinstance(level, int) and not isinstance(level, bool):
            compiles = _named(CompilationLevel, "level", level) is CompilationLevel.PIECEWISE
            level = "PIECEWISE" if compiles else "NONE"
        elif graphs is not None and level is not None:
            raise ValueError(f"level={level!r} and cudagraph_mode={graphs!r} both choose the graphs: give one of them")
        if mode is not None:
            level = "FULL" if _named(CompilationMode, "mode", mode) is CompilationMode.VLLM_COMPILE else "NONE"
        if graphs is not None:
            level = _OF_GRAPHS[_named(CUDAGraphMode, "cudagraph_mode", graphs)]
        return fields if level is None else {"level": level, **fields}

    @field_validator("cudagraph_capture_sizes", mode="after")
    @classmethod
    def _in_order(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(set(sizes)))


def _named(kind: type[Names], option: str, value: object) -> Names:
    """Finds a member by itself, its value or its name. Raises ValueError."""
    for each in kind:
        if value in (each, each.value, each.name) and not isinstance(value, bool):
            return each
    known = ", ".join(f"{each.value} ({each.name})" if isinstance(each, int) else each.name for each in kind)
    raise ValueError(f"{option}={value!r}: use one of {known}")
