"""Tensors and metadata of a GGUF file, dequantized and under Hugging Face names."""

import math
import mmap
import re
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

from kernels.linear.weights import Weight
from runtime.tokenizer.gguf_header import HeaderError, StoredTensor, read_header
from worker.model_config import ModelConfig
from worker.models.config import config_from_gguf
from worker.models.registry import gguf_family_of
from worker.weights.conversion import converted
from worker.weights.gguf_weights import INTEGER_KINDS, integer_weight
from worker.weights.quantization.kinds import Quantization
from worker.weights.reader import Shape, WeightsError, some

QUANTIZATIONS = (
    Kind.F32,
    Kind.F16,
    Kind.BF16,
    Kind.Q8_0,
    Kind.Q4_0,
    Kind.Q4_1,
    Kind.Q5_0,
    Kind.Q5_1,
    Kind.Q2_K,
    Kind.Q3_K,
    Kind.Q4_K,
    Kind.Q5_K,
    Kind.Q6_K,
    Kind.IQ4_NL,
    Kind.IQ4_XS,
    Kind.MXFP4,
)
ROPE_FACTORS = "rope_freqs.weight"
# A tensor without the suffix .weight, and a weight that files store as a vector.
SINKS, _SHARED_GATE = "self_attn.sinks", ".shared_expert_gate.weight"

_MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the model: a stored one, or some rows of it. expert: its index in a tensor that holds all experts."""

    stored: StoredTensor
    shape: Shape
    first: int = 0
    expert: int | None = None


def hugging_face_names(name: str, architecture: str) -> tuple[str, ...]:
    """Maps blk.3.attn_q.weight to model.layers.3.self_attn.q_proj.weight; unknown names stay as they are. See
    GgufFamily.layer_names. architecture: as GGUF names it."""
    layer, names = _LAYER_TENSOR.fullmatch(name), {**_LAYER_NAMES, **gguf_family_of(architecture).layer_names}
    if layer and layer[2] in names:
        found = names[layer[2]]
        suffix = "" if found == SINKS else f".{layer[3]}"
        several = (found,) if isinstance(found, str) else found
        return tuple(f"model.layers.{layer[1]}.{each}{suffix}" for each in several)
    stem, _, kind = name.rpartition(".")
    return (f"{_MODEL_NAMES[stem]}.{kind}" if stem in _MODEL_NAMES else name,)


def _parts(names: tuple[str, ...], stored: StoredTensor, config: ModelConfig) -> dict[str, Part]:
    """Returns the model's tensors in a stored one. Raises ValueError if its shape does not fit."""
    [name, *others], shape = names, stored.shape
    if "{}" in name:
        return {name.format(i): Part(stored, shape[1:], expert=i) for i in range(shape[0])}
    if name.endswith(_SHARED_GATE) and len(shape) == 1:
        # A linear layer with one output.
        return {name: Part(stored, (1, *shape))}
    if not others:
        return {name: Part(stored, shape)}
    first = config.num_heads * config.head_size if len(names) == 3 else shape[0] // 2
    rest, left = divmod(shape[0] - first, len(others))
    if rest < 1 or left:
        raise ValueError(f"{' and '.join(names)} of {shape[0]} rows together: the first one has {first}")
    starts = [0, *(first + i * rest for i in range(len(others)))]
    return {
        each: Part(stored, (rest if start else first, *shape[1:]), first=start)
        for each, start in zip(names, starts, strict=True)
    }


class GGUFSource:
    """A TensorSource over one GGUF file, mapped into memory. Raises WeightsError if the file is damaged or the model is
    not supported."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = [path]
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise WeightsError(f"{path}: cannot be read: {error}") from None
        try:
            header = read_header(path, self._data)
        except HeaderError as error:
            raise WeightsError(str(error)) from None
        unsupported = {
            tensor.kind: f"{tensor.kind.name} ({name})"
            for name, tensor in header.tensors.items()
            if tensor.kind not in QUANTIZATIONS
        }
        if unsupported:
            raise WeightsError(
                f"{path}: quantization {some(sorted(unsupported.values()))} is not supported; "
                f"{', '.join(kind.name for kind in QUANTIZATIONS)} are"
            )
        stored = dict(header.tensors)
        factors = stored.pop(ROPE_FACTORS, None)
        freq_factors = None if factors is None else tuple(_dequantized(self._rows(factors), factors.kind).tolist())
        try:
            self.config = config_from_gguf(header.metadata, stored, freq_factors)
            architecture = header.metadata["general.architecture"]
            self._parts: dict[str, Part] = {}
            for name, tensor in stored.items():
                parts = _parts(hugging_face_names(name, architecture), tensor, self.config)
                if twice := self._parts.keys() & parts:
                    raise ValueError(f"{min(twice)} is there twice: in {name}, too")
                self._parts |= parts
        except ValueError as error:
            raise WeightsError(f"{path}: {error}") from None
        self.shapes: dict[str, Shape] = {name: part.shape for name, part in self._parts.items()}
        self._pairs_neighbours = gguf_family_of(architecture).pairs_neighbours

    def tensor(self, name: str, dtype: torch.dtype | None = None, rows: slice | None = None) -> torch.Tensor:
        part = self._parts[name]
        kind, dtype = part.stored.kind, dtype or torch.float32
        if len(part.shape) < 2:
            numbers = torch.from_numpy(_dequantized(self._rows_of(part), kind)).to(dtype)
            return numbers[part.first : part.first + math.prod(part.shape)]

        def read(piece: slice) -> torch.Tensor:
            return torch.from_numpy(_dequantized(self._rows_in_order(name, piece), kind))

        return converted(part.shape, dtype, read, rows or slice(0, part.shape[0]))

    def weight(self, name: str, rows: slice | None = None) -> Weight:
        part, weight = self._parts[name], None
        kind = part.stored.kind
        if kind in INTEGER_KINDS:
            rows_OB = self._rows_in_order(name, rows or slice(0, part.shape[0]))
            weight = integer_weight(kind, rows_OB, part.shape[-1])
        return self.tensor(name, None, rows) if weight is None else weight

    def kind_of(self, name: str) -> Kind:
        return self._parts[name].stored.kind

    def is_left_out(self, name: str) -> bool:
        return False

    def is_packed_for(self, quantization: Quantization) -> bool:
        return False

    def kv_scale(self, attention: str) -> tuple[float, float] | None:
        return None

    def _rows_in_order(self, name: str, rows: slice) -> np.ndarray:
        """Returns some rows of a matrix, in Hugging Face's order, as uint8."""
        part = self._parts[name]
        stored_rows = self._rows_of(part)
        if self._pairs_neighbours and (".q_proj." in name or ".k_proj." in name):
            num_heads = self.config.num_heads if ".q_proj." in name else self.config.num_kv_heads
            return stored_rows[_halves_from_neighbours(np.arange(part.shape[0]), num_heads)[rows]]
        return stored_rows[part.first + rows.start : part.first + rows.stop]

    def _rows_of(self, part: Part) -> np.ndarray:
        """Returns the rows of the stored tensor that the part is in, and of its expert alone, as uint8. A vector is one
        row."""
        rows = self._rows(part.stored)
        if part.expert is not None:
            return rows[part.expert]
        return rows[None] if len(part.stored.shape) < len(part.shape) else rows

    def _rows(self, tensor: StoredTensor) -> np.ndarray:
        """Returns a tensor's rows as uint8, a view of the file."""
        stored = np.frombuffer(self._data, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)
        return stored.reshape(*tensor.shape[:-1], -1)


def _halves_from_neighbours(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorders the rows of each head from pairs (2i, 2i + 1) to pairs (i, i + head size / 2)."""
    return rows.reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _dequantized(rows: np.ndarray, kind: Kind) -> np.ndarray:
    """Returns rows of bytes as float32, in memory of its own."""
    if kind is Kind.F32:
        return rows.view("<f4").copy()
    if kind is Kind.F16:
        return rows.view("<f2").astype(np.float32)
    return gguf.dequantize(rows, kind)
