"""From a model's files to a model that computes."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from runtime.model_files import ModelFiles
from worker.model_config import ModelConfig
from worker.models.registry import Model, model_class
from worker.weights.digest import files_digest
from worker.weights.dummy_source import DummySource
from worker.weights.errors import WeightsError
from worker.weights.gguf_source import GGUFSource
from worker.weights.quantization import QUANTIZATIONS, Quantization
from worker.weights.safetensors_source import SafetensorsSource
from worker.weights.source import Take, TensorSource, check_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """digest: equal for equal weights and config, whatever machine they were loaded on."""

    model: Model
    config: ModelConfig
    digest: str


def load_model(
    files: ModelFiles,
    *,
    dtype: torch.dtype,
    load_format: str = "auto",
    quantization: Quantization = "none",
    progress: Callable[[float], None] = lambda fraction: None,
) -> LoadedModel:
    """Reads config and weights and packs them for this machine.

    load_format: auto, safetensors, gguf or dummy (random weights at the config's shapes). quantization: of the linear
    layers' weights. progress gets fractions from 0 to 1, on this thread. Raises WeightsError.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise WeightsError(f"dtype={dtype} is not supported; float32 and bfloat16 are")
    if quantization not in QUANTIZATIONS:
        raise WeightsError(f"quantization={quantization!r} is not supported; {', '.join(QUANTIZATIONS)} are")
    file_format = "gguf" if files.is_gguf else "safetensors"
    if load_format not in ("auto", "dummy", file_format):
        raise WeightsError(f"load_format={load_format!r} does not fit {files.path}, which is {file_format}; use auto")
    progress(0.0)
    config, source, digest = _open(files, dummy=load_format == "dummy")
    cls = model_class(config.architecture)
    shapes = cls.tensor_shapes(config)
    tensors: TensorSource = source or DummySource(files.path, shapes)
    check_tensors(tensors, shapes, tied=config.tie_word_embeddings)
    with torch.inference_mode():
        model = cls(config, Take(tensors, shapes, dtype, quantization, progress), dtype)
    return LoadedModel(model=model, config=config, digest=digest)


def _open(
    files: ModelFiles, *, dummy: bool
) -> tuple[ModelConfig, GGUFSource | SafetensorsSource | None, str]:
    """The config, where its tensors are (None: nowhere, they are to be random), and the digest of both."""
    source: GGUFSource | SafetensorsSource | None = None
    config_files = []
    if files.is_gguf:
        source = GGUFSource(files.path)
        config = source.config
    else:
        config_files = [files.path / "config.json"]
        try:
            config = ModelConfig.from_directory(files.path)
        except ValueError as error:
            raise WeightsError(str(error)) from None
        if not dummy:
            source = SafetensorsSource(files.path)
    if dummy or source is None:
        return config, None, hashlib.sha256(f"dummy {config}".encode()).hexdigest()
    return config, source, files_digest([*config_files, *source.files])
