"""Options of workers that compute on GPUs."""

import json
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from configs.groups.field import GPU, option


class CompilationConfig(BaseModel):
    """The use of CUDA graphs for steps. Immutable."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # NONE: Python launches every kernel. PIECEWISE: graphs of the parts between the layers' attention. FULL: one graph
    # for a step that only decodes, pieces for all others.
    level: Literal["NONE", "PIECEWISE", "FULL"] = "FULL"
    # Step sizes in tokens to capture graphs for. A step is padded to the next size; above the last one it runs without
    # graphs. Empty: 1, 2, 4, multiples of 8 up to 256, of 16 up to 512, as far as the other options allow steps that
    # large, and the largest step that they allow.
    cudagraph_capture_sizes: tuple[Annotated[int, Field(ge=1, le=65_536)], ...] = ()

    @field_validator("cudagraph_capture_sizes", mode="after")
    @classmethod
    def _in_order(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(set(sizes)))


def _from_json(value: object) -> object:
    """Accepts JSON, from the environment or a flag."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f'not JSON ({error}); such as \'{{"level": "FULL"}}\' is') from None


class GpuOptions(BaseModel):
    """Part of configs.options.Options, which validates all groups."""

    device: Literal["auto", "cpu", "cuda"] = option(
        GPU, "auto", "Device that workers compute on. auto: cuda if torch finds a GPU, else cpu."
    )
    gpu_memory_utilization: float = option(
        GPU,
        0.9,
        "Fraction of each GPU's memory that its worker may take, for weights, graphs, a step's intermediate results "
        "and, with the rest, the KV cache.",
        gt=0,
        le=1,
    )
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8", "fp8_e4m3"] = option(
        GPU,
        "auto",
        "Type of the KV cache. auto: as dtype. fp8_e4m3 (fp8 is the same; GPUs only): half of the memory, with the "
        "checkpoint's scales, or 1.",
    )
    enforce_eager: bool = option(GPU, False, "Use no CUDA graphs, as with level NONE in compilation_config.")
    compilation_config: Annotated[CompilationConfig, BeforeValidator(_from_json)] = option(
        GPU,
        CompilationConfig(),
        'CUDA graphs, as JSON: {"level": "NONE" | "PIECEWISE" | "FULL", "cudagraph_capture_sizes": [1, 2, 4, ...]}. '
        "PIECEWISE: graphs of the parts between attentions. FULL: also of whole decode steps.",
    )
    batch_invariant: bool = option(
        GPU,
        False,
        "On GPUs, give a request's logits the same bits whatever else is in its batch and however its prompt is cut; "
        "slower. On CPUs they always have.",
    )
