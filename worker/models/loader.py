"""Loads a model from its files."""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from configs.groups.media import ItemLimits, ProcessorOptions
from kernels.backend import Backend
from kernels.cpu_backend import cpu_backend
from kernels.native.memory import WeightMemory
from protos.inference_pb2 import ITEM_KIND_IMAGE, ITEM_KIND_VIDEO
from runtime.media.recipes.recipe import Recipe
from runtime.model_files import ModelFiles
from runtime.tokenizer.files import tokenizer_directory
from worker.encoders.encoder import Encoder
from worker.model_config import ModelConfig
from worker.models.config import ModelImpl, config_from_directory, read_json
from worker.models.decoder import Model
from worker.models.family import MakeEncoder
from worker.models.gguf_source import GGUFSource
from worker.models.registry import family_of, model_of, open_files
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
from worker.weights.reader import Shape, WeightReader, WeightsError
from worker.weights.safetensors_source import SafetensorsSource
from worker.weights.source import DummySource, SourceReader, TensorSource, check_tensors

_log = logging.getLogger("octavo.worker")

_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that is ready to compute. digest: equal for equal weights and config, on any machine. quantization: never
    auto."""

    model: Model
    config: ModelConfig
    digest: str
    quantization: Quantization
    # How images and videos become tokens, and what makes embeddings of them, on ranks of the first stage. None: none
    # are wanted, or the model takes none.
    recipe: Recipe | None = None
    encoder: Encoder | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedItems:
    """The images and videos that the options ask a model to take. tokenizer: the option."""

    limits: ItemLimits
    processor: ProcessorOptions
    tokenizer: str = ""


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
    items: WantedItems | None = None,
    progress: Callable[[float], None] = lambda fraction: None,
) -> LoadedModel:
    """Reads a model's config and weights, and packs the weights for this machine.

    load_format: auto, safetensors, gguf or dummy (random weights with the config's shapes). quantization: of the linear
    layers' weights; auto: what the checkpoint was made for, if the backend supports it. model_impl: see
    worker.models.config. make_backend: makes the backend that computes the model; None: the best one for `dtype` on
    this CPU. cache: looks up and keeps packed weights, but not random ones. max_model_len: the longest sequence that
    the model will compute, on which some ropes depend; 0: the model's context. items: None: text only. progress gets
    fractions from 0 to 1, on this thread. Raises WeightsError.
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
    checkpoint = open_checkpoint(files, remember, dummy=load_format == "dummy", model_impl=model_impl, items=items)
    config = checkpoint.config.for_length(max_model_len)
    backend = cpu_backend(dtype, config.head_size) if make_backend is None else make_backend(config)
    resolved = resolve_quantization(quantization, checkpoint.made_for, backend)
    _log_stored(files, checkpoint, resolved, dtype)
    cls, media = model_of(config), checkpoint.media
    shapes, left_out = cls.tensor_shapes(config), config.left_out
    has_encoder = media is not None and backend.stage.is_first
    if media is not None and has_encoder:
        shapes |= media.shapes
    elif media is not None:
        left_out = (*left_out, *media.shapes)
    check_tensors(checkpoint.tensors, shapes, tied=config.tie_word_embeddings, left_out=left_out)
    reader = partial(SourceReader, checkpoint.tensors, shapes, dtype, resolved, progress, backend.device)
    with torch.inference_mode():

        def make(reader: WeightReader) -> tuple[Model, Encoder | None]:
            model = cls(config, reader, backend)
            return model, media.encoder(reader, backend) if media is not None and has_encoder else None

        if cache is None or backend.native is None or load_format == "dummy":
            model, encoder = make(reader())
        else:
            digest = dated_digest(checkpoint.digest, checkpoint.files)
            path = _packed_for(backend, config) + ("-items" if has_encoder else "")
            kept = PackedModel(digest=digest, quantization=resolved, path=path)
            model, encoder = _with_cache(make, reader, cache, kept, backend.native.weights)
    recipe = None if media is None else media.recipe
    return LoadedModel(
        model=model, config=config, digest=checkpoint.digest, quantization=resolved, recipe=recipe, encoder=encoder
    )


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
    make: Callable[[WeightReader], _Made],
    reader: Callable[[], SourceReader],
    cache: WeightCache,
    kept: PackedModel,
    memory: WeightMemory,
) -> _Made:
    empty = partial(memory.empty, dtype=torch.uint8)
    file = cache.find(kept)
    if file is not None:
        try:
            return make(CachedWeightReader(reader(), file, empty))
        except DamagedFileError as error:
            cache.discard(file.path, error)
        finally:
            file.close()
    keeping = CachedWeightReader(reader(), None, empty)
    made = make(keeping)
    cache.keep(kept, keeping.tensors, keeping.notes)
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class _Media:
    """A checkpoint's parts for images and videos."""

    raw: Mapping[str, Any]
    directory: Path
    make: MakeEncoder
    recipe: Recipe
    # The encoder's tensors.
    shapes: Mapping[str, Shape]
    processor: ProcessorOptions

    def encoder(self, reader: WeightReader, backend: Backend) -> Encoder:
        return self.make(self.raw, self.directory, self.recipe, reader, backend, self.processor)


def _media_of(files: ModelFiles, config: ModelConfig, items: WantedItems | None) -> _Media | None:
    """Returns None if the model takes no images or videos, or none are wanted. Raises WeightsError."""
    if items is None or files.is_gguf or config.library is not None:
        return None
    family = family_of(config.architecture)
    counts = {ITEM_KIND_IMAGE: items.limits.image.count, ITEM_KIND_VIDEO: items.limits.video.count}
    if family.recipe is None or family.encoder is None or not any(counts.values()):
        return None

    def encode(text: str) -> Sequence[int]:
        import tokenizers  # only some recipes read texts

        directory = tokenizer_directory(files, items.tokenizer)
        tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        return tokenizer.encode(text, add_special_tokens=False).ids

    raw = read_json(files.path / "config.json")
    try:
        recipe = family.recipe(raw, files.path, encode)
        shapes = family.encoder.shapes(raw)
    except ValueError as error:
        raise WeightsError(
            f"{files.path}: {error}; limit_mm_per_prompt={_NO_ITEMS} loads the text model alone"
        ) from None
    if not any(count and recipe.placeholder(kind) is not None for kind, count in counts.items()):
        return None
    return _Media(
        raw=raw, directory=files.path, make=family.encoder, recipe=recipe, shapes=shapes, processor=items.processor
    )


_NO_ITEMS = '{"image": 0, "video": 0}'


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
    # None: no images or videos.
    media: _Media | None = None


def open_checkpoint(
    files: ModelFiles,
    remember: Path | None,
    *,
    dummy: bool,
    model_impl: ModelImpl = "auto",
    items: WantedItems | None = None,
) -> Checkpoint:
    """Opens a model's files. remember: a directory for digests of files, as in files_digest. items: as for
    load_model."""
    if files.is_gguf:
        _check_gguf(files, model_impl)
        source = GGUFSource(files.path)
        if not dummy:
            digest = files_digest(source.files, remember)
            return Checkpoint(config=source.config, tensors=source, digest=digest, files=source.files)
        config, stored = source.config, StoredQuantization()
    else:
        config, stored = _read_config(files.path, model_impl)
    media = _media_of(files, config, items)
    shapes = model_of(config).tensor_shapes(config) | dict({} if media is None else media.shapes)
    if dummy:
        digest = hashlib.sha256(f"dummy {config}".encode()).hexdigest()
        tensors = DummySource(files.path, shapes)
        return Checkpoint(config=config, tensors=tensors, digest=digest, made_for=stored.made_for, media=media)
    stored_files = open_files(config, files.path)
    return Checkpoint(
        config=config,
        tensors=SafetensorsSource(stored_files, stored, shapes),
        digest=files_digest([files.path / "config.json", *stored_files.files], remember),
        files=stored_files.files,
        made_for=stored.made_for,
        stored_as=stored.description,
        media=media,
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


def config_of(files: ModelFiles, model_impl: ModelImpl = "auto") -> tuple[ModelConfig, Quantization]:
    """Returns a model's config, and the quantization that its checkpoint was made for. Raises ValueError, as loading
    does."""
    if files.is_gguf:
        _check_gguf(files, model_impl)
        return GGUFSource(files.path).config, "none"
    config, stored = _read_config(files.path, model_impl)
    return config, stored.made_for
