"""Loads a model from its files."""

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from configs.groups.media import ProcessorOptions
from kernels.backend import Backend
from kernels.cpu_backend import cpu_backend
from kernels.native.memory import WeightMemory
from runtime.media.recipes.recipe import Recipe
from runtime.model_files import ModelFiles
from worker.encoders.encoder import Encoder
from worker.model_config import ModelConfig
from worker.models.config import ModelImpl, config_from_directory, read_json
from worker.models.decoder import Model
from worker.models.family import Family
from worker.models.gguf_source import GGUFSource
from worker.models.registry import ARCHITECTURES, family_of, model_of, open_files
from worker.weights.cache import CachedWeightReader, DamagedFileError, PackedModel, WeightCache
from worker.weights.digest import dated_digest, files_digest
from worker.weights.quantization.kinds import (
    QUANTIZATION_OPTIONS,
    Quantization,
    QuantizationOption,
    resolve_quantization,
)
from worker.weights.quantization.layers import StoredQuantization
from worker.weights.quantization.methods import stored_quantization
from worker.weights.reader import WeightsError
from worker.weights.safetensors_source import SafetensorsSource
from worker.weights.source import DummySource, SourceReader, TensorSource, check_tensors

_log = logging.getLogger("octavo.worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that is ready to compute. digest: equal for equal weights and config, on any machine. quantization: never
    auto."""

    model: Model
    config: ModelConfig
    digest: str
    quantization: Quantization


def load_model(
    files: ModelFiles,
    *,
    dtype: torch.dtype,
    load_format: str = "auto",
    quantization: QuantizationOption = "auto",
    model_impl: ModelImpl = "auto",
    make_backend: Callable[[ModelConfig], Backend] | None = None,
    cache: WeightCache | None = None,
    max_model_len: int = 0,
    progress: Callable[[float], None] = lambda fraction: None,
) -> LoadedModel:
    """Reads a model's config and weights, and packs the weights for this machine.

    load_format: auto, safetensors, gguf or dummy (random weights with the config's shapes). quantization: of the linear
    layers' weights; auto: what the checkpoint was made for, if the backend supports it. model_impl: see
    worker.models.config. make_backend: makes the backend that computes the model; None: the best one for `dtype` on
    this CPU. cache: looks up and keeps packed weights, but not random ones. max_model_len: the longest sequence that
    the model will compute, on which some ropes depend; 0: the model's context. progress gets fractions from 0 to 1, on
    this thread. Raises WeightsError.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise WeightsError(f"dtype={dtype} is not supported; float32 and bfloat16 are")
    if quantization not in QUANTIZATION_OPTIONS:
        raise WeightsError(f"quantization={quantization!r} is not supported; {', '.join(QUANTIZATION_OPTIONS)} are")
    file_format = "gguf" if files.is_gguf else "safetensors"
    if load_format not in ("auto", "dummy", file_format):
        raise WeightsError(f"load_format={load_format!r} does not fit {files.path}, which is {file_format}; use auto")
    progress(0.0)
    remember = None if cache is None else cache.directory
    checkpoint = open_checkpoint(files, remember, dummy=load_format == "dummy", model_impl=model_impl)
    config = checkpoint.config.for_length(max_model_len)
    backend = cpu_backend(dtype, config.head_size) if make_backend is None else make_backend(config)
    resolved = resolve_quantization(quantization, checkpoint.made_for, backend)
    _log_stored(files, checkpoint, resolved, dtype)
    cls = model_of(config)
    shapes = cls.tensor_shapes(config)
    check_tensors(checkpoint.tensors, shapes, tied=config.tie_word_embeddings, left_out=config.left_out)
    reader = partial(SourceReader, checkpoint.tensors, shapes, dtype, resolved, progress, backend.device)
    with torch.inference_mode():
        if cache is None or backend.native is None or load_format == "dummy":
            model = cls(config, reader(), backend)
        else:
            digest = dated_digest(checkpoint.digest, checkpoint.files)
            kept = PackedModel(digest=digest, quantization=resolved, path=_packed_for(backend, config))
            model = _with_cache(partial(cls, config, backend=backend), reader, cache, kept, backend.native.weights)
    return LoadedModel(model=model, config=config, digest=checkpoint.digest, quantization=resolved)


def _log_stored(files: ModelFiles, checkpoint: "Checkpoint", resolved: Quantization, dtype: torch.dtype) -> None:
    """Says what becomes of the weights of a checkpoint that packs them."""
    if not checkpoint.stored_as:
        return
    name = str(dtype).removeprefix("torch.")
    if checkpoint.tensors.is_packed_for(resolved):
        _log.info("%s stores weights as %s: they are kept as %s", files.path, checkpoint.stored_as, resolved)
    else:
        made = f"dequantized to {name}" if resolved == "none" else f"made {resolved} from floats where they are not"
        _log.info("%s stores weights as %s: they are %s", files.path, checkpoint.stored_as, made)


def _packed_for(backend: Backend, config: ModelConfig) -> str:
    ranks = (("rank", backend.shard), ("experts", backend.experts))
    library = "" if config.library is None else f"-transformers-{config.library.version}"
    name = (
        backend.name + library + "".join(f"-{what}-{each.rank}-of-{each.size}" for what, each in ranks if each.size > 1)
    )
    if backend.stage.size == 1:
        return name
    # The first and last layer also determine if embeddings or the head are included.
    layers = backend.stage.layers(config.num_layers)
    return f"{name}-layers-{layers.start}-to-{layers.stop}"


def _with_cache(
    make: Callable[..., Model],
    reader: Callable[[], SourceReader],
    cache: WeightCache,
    kept: PackedModel,
    memory: WeightMemory,
) -> Model:
    empty = partial(memory.empty, dtype=torch.uint8)
    file = cache.find(kept)
    if file is not None:
        try:
            return make(reader=CachedWeightReader(reader(), file, empty))
        except DamagedFileError as error:
            cache.discard(file.path, error)
        finally:
            file.close()
    keeping = CachedWeightReader(reader(), None, empty)
    model = make(reader=keeping)
    cache.keep(kept, keeping.tensors, keeping.notes)
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The files of a model, opened."""

    config: ModelConfig
    tensors: TensorSource
    digest: str
    # The files that hold the weights; empty: weights are random.
    files: Sequence[Path] = ()
    # The quantization that `auto` means on backends that support it.
    made_for: Quantization = "none"
    # How quantized weights are stored, for the log; empty: as floats, or by GGUF.
    stored_as: str = ""


def open_checkpoint(
    files: ModelFiles, remember: Path | None, *, dummy: bool, model_impl: ModelImpl = "auto"
) -> Checkpoint:
    """Opens a model's files. remember: a directory for digests of files, as in files_digest."""
    if files.is_gguf:
        _check_gguf(files, model_impl)
        source = GGUFSource(files.path)
        if not dummy:
            digest = files_digest(source.files, remember)
            return Checkpoint(config=source.config, tensors=source, digest=digest, files=source.files)
        config, stored = source.config, StoredQuantization()
    else:
        config, stored = _read_config(files.path, model_impl)
    shapes = model_of(config).tensor_shapes(config)
    if dummy:
        digest = hashlib.sha256(f"dummy {config}".encode()).hexdigest()
        tensors = DummySource(files.path, shapes)
        return Checkpoint(config=config, tensors=tensors, digest=digest, made_for=stored.made_for)
    stored_files = open_files(config, files.path)
    return Checkpoint(
        config=config,
        tensors=SafetensorsSource(stored_files, stored, shapes),
        digest=files_digest([files.path / "config.json", *stored_files.files], remember),
        files=stored_files.files,
        made_for=stored.made_for,
        stored_as=stored.description,
    )


def _check_gguf(files: ModelFiles, model_impl: ModelImpl) -> None:
    if model_impl == "transformers":
        raise WeightsError(
            f"model_impl=transformers reads directories with safetensors, not {files.path}, a GGUF file: use auto"
        )


def _read_config(directory: Path, model_impl: ModelImpl) -> tuple[ModelConfig, StoredQuantization]:
    try:
        config = config_from_directory(directory, model_impl)
    except ValueError as error:
        raise WeightsError(str(error)) from None
    file = directory / "config.json"
    try:
        return config, stored_quantization(read_json(file))
    except ValueError as error:
        raise WeightsError(f"{file}: {error}") from None


def load_encoder(
    files: ModelFiles,
    *,
    dtype: torch.dtype,
    backend: Backend,
    options: ProcessorOptions,
    load_format: str = "auto",
    model_impl: ModelImpl = "auto",
) -> Encoder | None:
    """Reads the encoder of a model's images and videos, and packs its weights, which are floats even where the language
    model's are quantized. backend: the language model's. options: mm_processor_kwargs. The other arguments: see
    load_model. Returns None if the model takes text only. Raises WeightsError.
    """
    family = _family_with_items(files, model_impl)
    if family is None:
        return None
    assert family.encoder is not None
    file = files.path / "config.json"
    raw = read_json(file)
    recipe = recipe_of(files, model_impl)
    assert recipe is not None
    try:
        shapes = family.encoder.shapes(raw)
        source: TensorSource
        if load_format == "dummy":
            source = DummySource(files.path, shapes)
        else:
            source = SafetensorsSource(family.open_files(files.path), stored_quantization(raw), shapes)
            check_tensors(source, shapes, tied=False, left_out=("",))
        reader = SourceReader(source, shapes, dtype, "none", lambda fraction: None, backend.device)
        with torch.inference_mode():
            return family.encoder(raw, files.path, recipe, reader, backend, options)
    except WeightsError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise WeightsError(f"{file}: {error}") from None


def recipe_of(files: ModelFiles, model_impl: ModelImpl = "auto") -> Recipe | None:
    """Returns how a model's images and videos become tokens; None: it takes text only. Raises WeightsError."""
    family = _family_with_items(files, model_impl)
    if family is None or family.recipe is None:
        return None

    def encode(text: str) -> list[int]:
        # Imported here because GPU benchmarks run models where tokenizers is not installed.
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(files.path / "tokenizer.json")).encode(text, add_special_tokens=False).ids

    try:
        return family.recipe(read_json(files.path / "config.json"), files.path, encode)
    except Exception as error:  # noqa: BLE001 - errors of tokenizers have no class of their own
        raise WeightsError(f"{files.path}: images can't become tokens: {error}") from None


def _family_with_items(files: ModelFiles, model_impl: ModelImpl) -> Family | None:
    if files.is_gguf or model_impl == "transformers":
        return None
    architecture = (read_json(files.path / "config.json").get("architectures") or [""])[0]
    family = family_of(architecture) if architecture in ARCHITECTURES else None
    return None if family is None or family.encoder is None else family


def config_of(files: ModelFiles, model_impl: ModelImpl = "auto") -> tuple[ModelConfig, Quantization]:
    """Returns a model's config, and the quantization that its checkpoint was made for. Raises ValueError, as loading
    does."""
    if files.is_gguf:
        _check_gguf(files, model_impl)
        return GGUFSource(files.path).config, "none"
    config, stored = _read_config(files.path, model_impl)
    return config, stored.made_for
