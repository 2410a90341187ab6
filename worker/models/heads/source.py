"""Finds the head that the options ask for. Checks, before weights are read, that it can draft for the model."""

from dataclasses import dataclass

import torch

from configs.options import Options
from kernels.shard import Stage
from runtime.model_files import ModelFiles, ModelNotFoundError, resolve_model
from worker.errors import PermanentError
from worker.models.heads.config import HEAD_METHODS, HeadConfig, head_config
from worker.models.heads.head import Head
from worker.models.heads.loader import HeadFiles, load_head
from worker.models.info import model_dtype
from worker.models.loader import LoadedModel, config_of
from worker.weights.quantization.kinds import QuantizationOption


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSource:
    """A head, checked. max_drafts: of a row in one step."""

    files: HeadFiles
    config: HeadConfig
    dtype: torch.dtype
    quantization: QuantizationOption
    max_drafts: int

    @property
    def name(self) -> str:
        """The method and the model, for Ready."""
        method, speculator = self.config.method, self.files.speculator
        return method if speculator is None else f"{method} {speculator.name}"

    def load(self, target: LoadedModel) -> Head:
        """Raises WeightsError."""
        return load_head(self.files, self.config, target, dtype=self.dtype, quantization=self.quantization)


def refuse_heads(options: Options) -> None:
    """On a GPU: raises PermanentError if the options ask for a head."""
    asked = options.speculative_config
    if asked is not None and asked.method in HEAD_METHODS:
        raise PermanentError(
            f"speculative_config: method={asked.method} drafts on CPUs only; on a GPU use ngram, suffix or auto"
        )


def find_head(options: Options, files: ModelFiles, last_stage: Stage) -> HeadSource | None:
    """Returns the head of speculative_config; None: it has none. files: the served model's. Raises PermanentError,
    naming the option or the file, if the head can't draft."""
    asked = options.speculative_config
    if asked is None or asked.method not in HEAD_METHODS:
        return None
    dtypes = {"auto": model_dtype(options), "float32": torch.float32, "bfloat16": torch.bfloat16}
    if dtypes[asked.dtype] is not model_dtype(options):
        raise PermanentError(
            f"speculative_config: dtype={asked.dtype} with method={asked.method}: a head has the model's dtype, "
            f"{options.dtype}; leave it out"
        )
    if asked.method == "mtp" and asked.quantization != "auto":
        raise PermanentError(
            f"speculative_config: quantization={asked.quantization} with method=mtp, whose layer has the model's: "
            "leave it out"
        )
    try:
        speculator = None if asked.method == "mtp" else resolve_model(asked.model)
        target, _ = config_of(files, options.model_impl)
        if target.library is not None:
            raise ValueError(f"method={asked.method} drafts for models of own families only; model_impl=transformers")
        if speculator is not None and speculator.is_gguf:
            raise ValueError(f"model={asked.model!r} is a GGUF file; heads are directories with safetensors")
        config = head_config(asked.method, None if speculator is None else speculator.path, target, last_stage)
    except (ModelNotFoundError, ValueError) as error:
        raise PermanentError(f"speculative_config: {error}") from None
    return HeadSource(
        files=HeadFiles(target=files, speculator=speculator, dummy=options.load_format == "dummy"),
        config=config,
        dtype=model_dtype(options),
        quantization=asked.quantization,
        max_drafts=asked.num_speculative_tokens,
    )
