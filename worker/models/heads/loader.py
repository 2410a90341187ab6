"""Loads drafting heads from speculators' checkpoints, and DeepSeek's from the target's own."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kernels.backend import Backend
from runtime.model_files import ModelFiles
from worker.models.config import read_json
from worker.models.decoder import Decoder, adapted
from worker.models.heads.config import HeadConfig
from worker.models.heads.eagle import EagleHead
from worker.models.heads.eagle3 import Eagle3Head, Eagle3Stored
from worker.models.heads.head import Head
from worker.models.heads.mtp import HEAD_OF_LAYER, MtpHead
from worker.models.heads.shared import SharedParts, backend_of_heads
from worker.models.loader import LoadedModel, open_checkpoint
from worker.models.registry import family_of
from worker.weights.quantization.kinds import Quantization, QuantizationOption, resolve_quantization
from worker.weights.quantization.layers import StoredQuantization
from worker.weights.quantization.methods import stored_quantization
from worker.weights.reader import Shape, WeightReader, WeightsError
from worker.weights.safetensors_files import SafetensorsFiles
from worker.weights.safetensors_source import SafetensorsSource
from worker.weights.source import DummySource, SourceReader, TensorSource, check_tensors

# Tensors of EAGLE's checkpoints that are copies of the target's.
_COPIES = ("embed_tokens.weight", "lm_head.weight")
# int64 [draft vocabulary]: what to add to the number of a draft to get its token. bool [vocabulary]: the tokens that
# can be drafted.
_DRAFT_TO_TARGET, _TARGET_TO_DRAFT = "d2t", "t2d"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFiles:
    """Where a head's weights are. target: the files of its model. speculator: its own; None for mtp. dummy: random
    weights at the config's shapes."""

    target: ModelFiles
    speculator: ModelFiles | None
    dummy: bool = False

    @property
    def directory(self) -> Path | None:
        return None if self.speculator is None else self.speculator.path


def load_head(
    files: HeadFiles, config: HeadConfig, target: LoadedModel, *, dtype: torch.dtype, quantization: QuantizationOption
) -> Head:
    """Reads a head's weights, and those that it shares with its target where this rank does not have them whole.

    quantization: of a speculator's linear layers; DeepSeek's layer has that of its model. Raises WeightsError.
    """
    backend = backend_of_heads(target.model.backend)
    with torch.inference_mode():
        shared = _shared(files, target, dtype)
        if config.method == "mtp":
            return _mtp(files, config, shared, target.quantization, dtype, backend)
        assert files.directory is not None
        return _eagle(files.directory, config, shared, quantization, dtype, backend, dummy=files.dummy)


def _shared(files: HeadFiles, target: LoadedModel, dtype: torch.dtype) -> SharedParts:
    checkpoint = open_checkpoint(files.target, None, dummy=files.dummy)
    model = family_of(target.config.architecture).model
    shapes = model.tensor_shapes(target.config)
    reader = _reader(checkpoint.tensors, shapes, dtype, target.quantization, target.model.backend)
    assert isinstance(target.model, Decoder)
    return SharedParts(target=target.model, reader=adapted(target.config, reader))


def _reader(
    source: TensorSource,
    shapes: Mapping[str, Shape],
    dtype: torch.dtype,
    quantization: Quantization,
    backend: Backend,
) -> WeightReader:
    return SourceReader(source, shapes, dtype, quantization, lambda fraction: None, backend.device)


def _mtp(
    files: HeadFiles,
    config: HeadConfig,
    shared: SharedParts,
    quantization: Quantization,
    dtype: torch.dtype,
    backend: Backend,
) -> Head:
    path, prefix = files.target.path, config.mtp_prefix
    head = f"{prefix}.{HEAD_OF_LAYER}"
    if files.dummy:
        shapes = MtpHead.shapes(config, own_output=False)
        reader = _reader(DummySource(path, shapes), shapes, dtype, quantization, backend)
        return MtpHead(config, shared, reader, backend, own_output=False)
    stored, opened = stored_quantization(read_json(path / "config.json")), SafetensorsFiles(path)
    # DeepSeek's checkpoints in FP8 leave these two in bfloat16.
    stored = replace(stored, ignored=(*stored.ignored, head, f"{prefix}.eh_proj"))
    own_output = f"{head}.weight" in opened.shapes
    shapes = MtpHead.shapes(config, own_output=own_output)
    source = SafetensorsSource(opened, stored, shapes)
    # All other tensors are the model's, which has checked them; the layer may hold a copy of the embeddings.
    source.shapes = {name: shape for name, shape in source.shapes.items() if name.startswith(f"{prefix}.")}
    check_tensors(source, shapes, tied=False, left_out=(f"{prefix}.embed_tokens.weight",))
    reader = _reader(source, shapes, dtype, quantization, backend)
    return MtpHead(config, shared, reader, backend, own_output=own_output)


def _eagle(
    directory: Path,
    config: HeadConfig,
    shared: SharedParts,
    quantization: QuantizationOption,
    dtype: torch.dtype,
    backend: Backend,
    *,
    dummy: bool,
) -> Head:
    stored, opened = _stored(directory), None if dummy else SafetensorsFiles(directory)
    found: Collection[str] = () if opened is None else opened.shapes
    fc_bias = "fc.bias" in found
    layout = Eagle3Stored(
        first_layer="layers.0" if any(name.startswith("layers.0.") for name in found) else "midlayer",
        own_embedding="embed_tokens.weight" in found,
        own_output=opened is None or "lm_head.weight" in found or config.draft_vocab_size < config.target.vocab_size,
    )
    if config.method == "eagle":
        shapes, left_out = EagleHead.shapes(config, fc_bias=fc_bias), _COPIES
    else:
        _check_embedding(directory, config, layout)
        shapes, left_out = Eagle3Head.shapes(config, layout), (_DRAFT_TO_TARGET, _TARGET_TO_DRAFT)
    source: TensorSource
    if opened is None:
        source = DummySource(directory, shapes)
    else:
        source = SafetensorsSource(opened, stored, shapes)
        check_tensors(source, shapes, tied=False, left_out=left_out)
    resolved = resolve_quantization(quantization, stored.made_for, backend)
    reader = _reader(source, shapes, dtype, resolved, backend)
    if config.method == "eagle":
        return EagleHead(config, shared, reader, backend, fc_bias=fc_bias)
    target_ids_V = None if opened is None else _target_ids(opened, config)
    return Eagle3Head(config, shared, reader, backend, layout, target_ids_V)


def _stored(directory: Path) -> StoredQuantization:
    file = directory / "config.json"
    try:
        return stored_quantization(read_json(file))
    except ValueError as error:
        raise WeightsError(f"{file}: {error}") from None


def _check_embedding(directory: Path, config: HeadConfig, layout: Eagle3Stored) -> None:
    if not layout.own_embedding and config.hidden_size != config.target.hidden_size:
        raise WeightsError(
            f"{directory}: lacks embed_tokens.weight; the head can't take the model's, since its hidden_size is "
            f"{config.hidden_size} and the model's {config.target.hidden_size}"
        )


def _target_ids(files: SafetensorsFiles, config: HeadConfig) -> torch.Tensor | None:
    """Returns the token of each draft, int64 [draft vocabulary]; None: drafts are tokens. Raises WeightsError unless
    d2t, and t2d if there is one, agree with the config."""
    num_drafts, num_tokens = config.draft_vocab_size, config.target.vocab_size
    if _DRAFT_TO_TARGET not in files.shapes:
        if num_drafts < num_tokens:
            raise WeightsError(
                f"{files.path}: lacks {_DRAFT_TO_TARGET}, which maps the {num_drafts} entries of draft_vocab_size to "
                "tokens"
            )
        return None
    offsets_V = _integers(files, _DRAFT_TO_TARGET, num_drafts)
    ids_V = torch.arange(num_drafts) + offsets_V
    if ((ids_V < 0) | (ids_V >= num_tokens)).any() or len(ids_V.unique()) < num_drafts:
        raise WeightsError(
            f"{files.path}: {_DRAFT_TO_TARGET} maps drafts to tokens beyond the vocabulary of {num_tokens}, or several "
            "to the same one"
        )
    if _TARGET_TO_DRAFT in files.shapes:
        can_draft = _integers(files, _TARGET_TO_DRAFT, num_tokens).bool()
        if int(can_draft.sum()) != num_drafts or not can_draft[ids_V].all():
            raise WeightsError(f"{files.path}: {_TARGET_TO_DRAFT} marks other tokens than {_DRAFT_TO_TARGET} maps to")
    return ids_V


def _integers(files: SafetensorsFiles, name: str, count: int) -> torch.Tensor:
    if files.shapes[name] != (count,) or files.dtypes[name] not in ("I64", "I32", "BOOL"):
        raise WeightsError(
            f"{files.path}: {name} is stored as {files.dtypes[name]} of shape {list(files.shapes[name])}; integers of "
            f"shape {[count]} are expected"
        )
    return files.read(name).long()
