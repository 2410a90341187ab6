"""Tensors and metadata of a GGUF file, dequantized and under Hugging Face names."""

import mmap
import re
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

from kernels.linear.weights import Weight
from worker.models.config import config_from_gguf
from worker.models.registry import gguf_family_of
from worker.weights.conversion import converted
from worker.weights.gguf_header import StoredTensor, read_header
from worker.weights.gguf_weights import INTEGER_KINDS, integer_weight
from worker.weights.quantization.kinds import Quantization
from worker.weights.reader import Shape, WeightsError, some

QUANTIZATIONS = (
    Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q2_K, Kind.Q3_K,
    Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL, Kind.IQ4_XS,
)  # fmt: skip
ROPE_FACTORS = "rope_freqs.weight"

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


def hugging_face_name(name: str, architecture: str) -> str:
    """Maps blk.3.attn_q.weight to model.layers.3.self_attn.q_proj.weight; unknown names stay as they are.
    architecture: as GGUF names it."""
    layer, names = _LAYER_TENSOR.fullmatch(name), {**_LAYER_NAMES, **gguf_family_of(architecture).layer_names}
    if layer and layer[2] in names:
        return f"model.layers.{layer[1]}.{names[layer[2]]}.{layer[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_MODEL_NAMES[stem]}.{kind}" if stem in _MODEL_NAMES else name


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
        header = read_header(path, self._data)
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
        except ValueError as error:
            raise WeightsError(f"{path}: {error}") from None
        architecture = header.metadata["general.architecture"]
        self._tensors = {hugging_face_name(name, architecture): tensor for name, tensor in stored.items()}
        self.shapes: dict[str, Shape] = {name: tensor.shape for name, tensor in self._tensors.items()}
        self._pairs_neighbours = gguf_family_of(architecture).pairs_neighbours

    def tensor(self, name: str, dtype: torch.dtype | None = None, rows: slice | None = None) -> torch.Tensor:
        stored = self._tensors[name]
        dtype = dtype or torch.float32
        if len(stored.shape) < 2:
            return torch.from_numpy(_dequantized(self._rows(stored), stored.kind)).to(dtype)

        def read(piece: slice) -> torch.Tensor:
            return torch.from_numpy(_dequantized(self._rows_in_order(name, piece), stored.kind))

        return converted(stored.shape, dtype, read, rows or slice(0, stored.shape[0]))

    def weight(self, name: str, rows: slice | None = None) -> Weight:
        stored = self._tensors[name]
        weight = None
        if stored.kind in INTEGER_KINDS:
            rows_OB = self._rows_in_order(name, rows or slice(0, stored.shape[0]))
            weight = integer_weight(stored.kind, rows_OB, stored.shape[-1])
        return self.tensor(name, None, rows) if weight is None else weight

    def kind_of(self, name: str) -> Kind:
        return self._tensors[name].kind

    def is_left_out(self, name: str) -> bool:
        return False

    def is_packed_for(self, quantization: Quantization) -> bool:
        return False

    def kv_scale(self, attention: str) -> tuple[float, float] | None:
        return None

    def _rows_in_order(self, name: str, rows: slice) -> np.ndarray:
        """Returns some rows of a matrix, in Hugging Face's order, as uint8."""
        stored = self._tensors[name]
        stored_rows = self._rows(stored)
        if self._pairs_neighbours and (".q_proj." in name or ".k_proj." in name):
            num_heads = self.config.num_heads if ".q_proj." in name else self.config.num_kv_heads
            return stored_rows[_halves_from_neighbours(np.arange(stored.shape[0]), num_heads)[rows]]
        return stored_rows[rows]

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
