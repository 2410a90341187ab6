"""Quantization of GGUF files: integers are kept as stored wherever nothing is lost."""

import struct
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import LlamaConfig, LlamaForCausalLM

from kernels.linear.weights import Int4Weight, Int8Weight, dequantize
from runtime.model_files import resolve_model
from tests.support.models.gguf_files import write_gguf
from tests.support.models.model_runs import ModelRun, relative_error
from worker.models.families.llama import LlamaModel
from worker.models.gguf_source import GGUFSource
from worker.models.loader import LoadedModel, load_model
from worker.weights.gguf_weights import integer_weight
from worker.weights.quantization.kinds import Quantization
from worker.weights.reader import WeightsError
from worker.weights.source import SourceReader

EMBEDDINGS = "model.embed_tokens.weight"
ATTENTION = "model.layers.0.self_attn"
SHAPE: dict[str, Any] = {
    "vocab_size": 80,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True))
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.2)
    model.save_pretrained(path)
    return path


def _reader(source: GGUFSource, quantization: Quantization, dtype: torch.dtype = torch.float32) -> SourceReader:
    return SourceReader(source, LlamaModel.tensor_shapes(source.config), dtype, quantization, lambda fraction: None)


def _linears(source: GGUFSource) -> list[str]:
    return [name for name, shape in source.shapes.items() if len(shape) == 2 and name != EMBEDDINGS]


def _load(path: Path, quantization: str, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return load_model(resolve_model(str(path)), dtype=dtype, quantization=cast(Any, quantization))


def _logits(loaded: LoadedModel) -> torch.Tensor:
    run = ModelRun(loaded)
    return run.step([(run.row([3, 1, 4, 1, 5], 5), 5)])


# --- the integers of a file


def _rows(kind: Kind, largest_scale: float) -> np.ndarray:
    """Bytes of 64 rows of 160 weights: any values, and any finite scales and minima of both signs, even subnormal."""
    random = np.random.default_rng(0)
    num_values, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (64, 160 // num_values, num_bytes), dtype=np.uint8)
    num_halves = 2 if kind is Kind.Q4_1 else 1
    sizes = np.exp(random.uniform(np.log(1e-8), np.log(largest_scale), (64, 5, num_halves)))
    halves = (sizes * random.choice([-1, 1], sizes.shape)).astype("<f2")
    halves[0] = 0.0
    blocks[:, :, : 2 * num_halves] = halves.view(np.uint8)
    return blocks.reshape(64, -1)


@pytest.mark.parametrize(
    ("kind", "largest_scale"),
    [(Kind.Q8_0, 65504), (Kind.Q5_0, 65504), (Kind.IQ4_NL, 65504), (Kind.Q4_1, 65504), (Kind.Q4_0, 65504 / 8)],
    ids=lambda k: str(k),
)
def test_integers_of_a_file_are_its_floats_to_the_bit(kind: Kind, largest_scale: float) -> None:
    rows = _rows(kind, largest_scale)
    weight = integer_weight(kind, rows, 160)
    signed = {Kind.Q8_0: (-128, 127), Kind.Q5_0: (-16, 15), Kind.IQ4_NL: (-127, 113)}
    assert isinstance(weight, Int8Weight if kind in signed else Int4Weight)
    assert torch.equal(dequantize(weight), torch.from_numpy(gguf.dequantize(rows, kind)))
    if isinstance(weight, Int8Weight):
        assert (int(weight.values_OI.min()), int(weight.values_OI.max())) == signed[kind]
    else:
        assert (weight.scales_OG < 0).any()
        assert (int(weight.values_OI.min()), int(weight.values_OI.max())) == (0, 15)


def test_a_q4_0_scale_whose_minimum_is_beyond_float16_goes_through_floats(directory: Path, tmp_path: Path) -> None:
    """float16 cannot hold -8 * 9000. int4's own minima cannot either, so the weights are kept in 8 bits."""
    path = write_gguf(tmp_path / "m.gguf", directory, Kind.Q4_0, arch="llama")
    source = GGUFSource(path)
    name = f"{ATTENTION}.o_proj.weight"
    data = bytearray(path.read_bytes())
    stored = source._parts[name].stored
    data[stored.offset : stored.offset + 2] = np.array([-9000], "<f2").tobytes()
    path.write_bytes(data)
    source = GGUFSource(path)
    assert source.tensor(name).abs().max() > 65504
    weight = source.weight(name)
    assert isinstance(weight, torch.Tensor)
    assert torch.equal(weight, source.tensor(name))
    kept = _reader(source, "int4").weight(name)
    assert isinstance(kept, Int8Weight)
    assert ((dequantize(kept) - weight).abs() <= kept.scales_OG * 0.5001).all()
    assert _logits(_load(path, "int4")).isfinite().all()


def test_rows_that_end_within_a_block_are_damage(directory: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", directory, Kind.Q4_0, arch="llama")
    name = b"blk.0.attn_q.weight"
    dims = {width: name + struct.pack("<IQ", 2, width) for width in (128, 120)}
    assert path.read_bytes().count(dims[128]) == 1
    path.write_bytes(path.read_bytes().replace(dims[128], dims[120]))
    with pytest.raises(WeightsError, match=r"blk\.0\.attn_q\.weight has rows of 120, not a multiple of 32"):
        _load(path, "int4")


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_rows_of_q_and_k_come_in_the_order_that_floats_come_in(
    directory: Path, tmp_path: Path, kind: Kind, arch: str
) -> None:
    """A llama file orders them for rope over neighbours; scales and minima must move with the values."""
    source = GGUFSource(write_gguf(tmp_path / "m.gguf", directory, kind, arch))
    for name in _linears(source):
        assert torch.equal(dequantize(source.weight(name)), source.tensor(name)), name


# --- quantization of a file


@pytest.mark.parametrize(
    ("stored", "quantization", "kind", "is_kept"),
    [
        (Kind.Q8_0, "int8", Int8Weight, True),
        (Kind.Q4_0, "int4", Int4Weight, True),
        (Kind.Q4_1, "int4", Int4Weight, True),
        (Kind.Q4_1, "int8", Int8Weight, False),
        (Kind.Q8_0, "int4", Int4Weight, False),
        (Kind.F32, "int8", Int8Weight, False),
        (Kind.BF16, "int4", Int4Weight, False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_in_as_many_bits_is_kept_to_the_bit_and_others_are_made_from_its_floats(
    directory: Path,
    tmp_path: Path,
    stored: Kind,
    quantization: Quantization,
    kind: type,
    is_kept: bool,
    dtype: torch.dtype,
) -> None:
    """This holds for each model dtype: an intermediate rounding to bf16 would show."""
    source = GGUFSource(write_gguf(tmp_path / "m.gguf", directory, stored, arch="llama"))
    reader = _reader(source, quantization, dtype)
    for name in _linears(source):
        weight, floats = reader.weight(name), source.tensor(name)
        assert isinstance(weight, kind)
        error = float((dequantize(weight) - floats).abs().max() / floats.abs().max())
        # The error is at most half of 1/127 of a row's largest, or of 2/15 of a group's; scales are rounded, too.
        assert error == 0 if is_kept else 0 < error < (0.0040 if kind is Int8Weight else 0.0670)


@pytest.mark.parametrize("stored", [Kind.Q8_0, Kind.Q4_1, Kind.F16])
def test_a_tied_head_stays_at_8_bits_under_int4_and_embeddings_stay_floats(
    directory: Path, tmp_path: Path, stored: Kind
) -> None:
    source = GGUFSource(write_gguf(tmp_path / "m.gguf", directory, stored, arch="llama"))
    for quantization in ("int4", "int8"):
        reader = _reader(source, quantization)
        head = reader.head_weight(EMBEDDINGS)
        assert isinstance(head, Int8Weight)
        assert head.is_grouped is (stored is Kind.Q8_0)
        assert torch.equal(reader(EMBEDDINGS), source.tensor(EMBEDDINGS))
    assert torch.equal(cast(torch.Tensor, _reader(source, "none").head_weight(EMBEDDINGS)), source.tensor(EMBEDDINGS))


@pytest.mark.parametrize(("quantization", "tolerance"), [("int8", 0.05), ("int4", 0.2)], ids=["int8", "int4"])
def test_a_fused_layer_whose_parts_are_stored_differently(
    directory: Path, tmp_path: Path, quantization: str, tolerance: float
) -> None:
    """q and k in 4 bits, v in 8, and the MLP's gate in floats, as in some files."""
    others = {f"{ATTENTION}.v_proj.weight": Kind.Q8_0, "model.layers.1.mlp.gate_proj.weight": Kind.F16}
    path = write_gguf(tmp_path / "m.gguf", directory, Kind.Q4_0, arch="llama", others=others)
    exact = _logits(_load(path, "none"))
    assert 0 < relative_error(_logits(_load(path, quantization)), exact) < tolerance


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
def test_without_a_quantization_a_file_gives_its_floats(directory: Path, tmp_path: Path, kind: Kind) -> None:
    path = write_gguf(tmp_path / "m.gguf", directory, kind, arch="llama")
    loaded = _load(path, "auto", torch.bfloat16)
    assert loaded.quantization == "none"
    source = GGUFSource(path)
    for name in _linears(source):
        weight = _reader(source, "none", torch.bfloat16).weight(name)
        assert isinstance(weight, torch.Tensor)
        assert torch.equal(weight, source.tensor(name).bfloat16())


def test_progress_counts_quantized_tensors_too(directory: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", directory, Kind.Q4_1, arch="llama")
    seen: list[float] = []
    load_model(resolve_model(str(path)), dtype=torch.float32, quantization="int4", progress=seen.append)
    assert (seen[0], seen[-1]) == (0.0, 1.0)
    assert seen == sorted(seen)


def test_an_unknown_quantization_is_refused_with_those_that_are_known(directory: Path) -> None:
    with pytest.raises(WeightsError, match=r"quantization='awq' is not supported; auto, none, int8, fp8, int4 are"):
        _load(directory, "awq")
