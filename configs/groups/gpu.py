"""Options of workers that compute on GPUs."""

from typing import Annotated, Literal

from pydantic import BaseModel

from configs.groups.compilation import CompilationConfig
from configs.groups.field import GPU, json_text, option


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
    enforce_eager: bool = option(GPU, False, "Use no CUDA graphs, as with level NONE in compilation_config.")
    compilation_config: Annotated[CompilationConfig, json_text('{"level": "FULL"}')] = option(
        GPU,
        CompilationConfig(),
        'CUDA graphs, as JSON: {"level": "NONE" | "PIECEWISE" | "FULL", "cudagraph_capture_sizes": [1, 2, 4, ...]}. '
        "PIECEWISE: graphs of the parts between attentions. FULL: also of whole decode steps. Takes vLLM's levels 0 to "
        "3, alone or as level, its mode and its cudagraph_mode, too (docs/gpu.md).",
    )
    batch_invariant: bool = option(
        GPU,
        False,
        "On GPUs, give a request's logits the same bits whatever else is in its batch and however its prompt is cut; "
        "slower. On CPUs they always have.",
    )
