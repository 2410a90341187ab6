"""Checkpoints in packed layouts, written as their libraries write them: their floats are those that the library makes,
bit by bit, and kernels get the stored integers wherever they express the weight."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from kernels.linear.weights import Int4Weight, Int8Weight, Weight, dequantize, slice_inputs
from runtime.model_files import resolve_model
from tests.support.checkpoints.codes import mxfp4
from tests.support.checkpoints.integers import Tensors
from tests.support.checkpoints.layouts import LAYOUTS, Layout, layout_tensors, write_checkpoint
from tests.support.models.model_runs import ModelRun, relative_error
from worker.models.config import config_from_directory, read_json
from worker.models.families.llama import LlamaModel
from worker.models.loader import LoadedModel, load_model
from worker.weights.cache import WeightCache
from worker.weights.fused_files import Phi3Files
from worker.weights.quantization.kinds import Quantization
from worker.weights.quantization.layers import StoredQuantization
from worker.weights.quantization.methods import stored_quantization
from worker.weights.quantization.mxfp4 import MXFP4_BLOCKS
from worker.weights.reader import WeightsError
from worker.weights.safetensors_files import SafetensorsFiles
from worker.weights.safetensors_source import SafetensorsSource
from worker.weights.source import SourceReader

SHAPE: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 192,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
# 192 inputs end within a group of 128.
Q, OUTPUT, DOWN = (
    f"model.layers.1.{name}.weight" for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")
)
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.2)
    path = tmp_path_factory.mktemp("floats")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> Layout:
    return LAYOUTS[request.param]


@pytest.fixture(scope="module")
def checkpoint(layout: Layout, base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors]:
    """The checkpoint, and the floats that its library makes of it."""
    stored, floats = layout_tensors(base, layout)
    return write_checkpoint(tmp_path_factory.mktemp("packed"), base, stored, layout.config), floats


def _source(path: Path) -> SafetensorsSource:
    shapes = LlamaModel.tensor_shapes(config_from_directory(path))
    return SafetensorsSource(SafetensorsFiles(path), stored_quantization(read_json(path / "config.json")), shapes)


def _reader(path: Path, quantization: Quantization, dtype: torch.dtype = torch.bfloat16) -> SourceReader:
    shapes = LlamaModel.tensor_shapes(config_from_directory(path))
    return SourceReader(_source(path), shapes, dtype, quantization, lambda fraction: None)


def _load(path: Path, quantization: Any = "auto", **options: Any) -> LoadedModel:
    return load_model(resolve_model(str(path)), dtype=torch.float32, quantization=quantization, **options)


def _logits(loaded: LoadedModel) -> torch.Tensor:
    run = ModelRun(loaded)
    return run.step([(run.row(TOKENS, len(TOKENS)), len(TOKENS))])


def _exact(floats: torch.Tensor, published: torch.Tensor) -> bool:
    """True if floats, rounded once to the library's dtype, are the library's."""
    return torch.equal(floats.to(published.dtype), published)


def _tensor(weight: Weight) -> torch.Tensor:
    assert isinstance(weight, torch.Tensor)
    return weight


def test_floats_are_the_librarys_bit_by_bit(checkpoint: tuple[Path, Tensors]) -> None:
    path, floats = checkpoint
    source = _source(path)
    for name, published in floats.items():
        assert _exact(source.tensor(name), published), name
    assert _exact(source.tensor(DOWN, None, slice(5, 77)), floats[DOWN][5:77])


@pytest.mark.parametrize("name", ["gptq-4-64-asymmetric", "gptq-4-32-v2"])
def test_zero_points_of_0_borrow_from_their_neighbours(name: str, base: Path, tmp_path: Path) -> None:
    """Groups without a negative weight have the zero point 0, which gptq stores as -1 in the word of eight."""
    layout = LAYOUTS[name]

    def write(layer: str, weight_OI: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        positive_OI = weight_OI.clone()
        positive_OI[::3] = positive_OI[::3].abs()
        return layout.write(layer, positive_OI)

    stored, floats = layout_tensors(base, replace(layout, write=write))
    path = write_checkpoint(tmp_path, base, stored, layout.config)
    source = _source(path)
    for name in (Q, OUTPUT, DOWN):
        assert _exact(source.tensor(name), floats[name]), name
        assert _exact(dequantize(source.weight(name)), floats[name]), name


def test_kernels_get_what_is_stored(checkpoint: tuple[Path, Tensors], layout: Layout, base: Path) -> None:
    path, floats = checkpoint
    loaded = _load(path)
    assert loaded.quantization == layout.auto
    reader, source = _reader(path, layout.auto), _source(path)
    for name in (Q, OUTPUT, DOWN):
        weight = reader.weight(name)
        if isinstance(weight, torch.Tensor):
            assert weight.dtype is torch.bfloat16
            assert torch.equal(weight, source.tensor(name).bfloat16())
            continue
        assert isinstance(weight, Int4Weight if layout.auto == "int4" else Int8Weight)
        if layout.config.get("load_in_8bit"):
            # A scale of 1/127 of the largest number, rounded once more.
            assert relative_error(dequantize(weight), floats[name]) < 1e-6
        else:
            assert _exact(dequantize(weight), floats[name])
    kept = isinstance(reader.weight(Q), Int4Weight | Int8Weight)
    assert kept is (layout.auto != "none" and layout is not LAYOUTS["w8a16-128-asymmetric"])
    head = reader.head_weight("lm_head.weight")
    assert isinstance(head, torch.Tensor), "the checkpoint leaves the head in floats"


def test_it_computes_what_its_floats_compute(checkpoint: tuple[Path, Tensors], base: Path, tmp_path: Path) -> None:
    path, _ = checkpoint
    source = _source(path)
    floats = {name: source.tensor(name).clone() for name in LlamaModel.tensor_shapes(config_from_directory(path))}
    of_floats = write_checkpoint(tmp_path, base, floats, None)
    assert torch.equal(_logits(_load(path, "none")), _logits(_load(of_floats)))


def test_a_rank_reads_its_part(checkpoint: tuple[Path, Tensors], layout: Layout) -> None:
    """Parts of outputs that begin within a word, and parts of inputs that begin within a group of 128."""
    path, _ = checkpoint
    for quantization in dict.fromkeys(("none", layout.auto)):
        reader = _reader(path, quantization)
        for name in (Q, OUTPUT, DOWN):
            whole = dequantize(reader.weight(name))
            outputs, inputs = slice(12, 77), slice(96, whole.shape[1])
            assert torch.equal(dequantize(reader.weight(name, outputs)), whole[outputs])
            assert torch.equal(dequantize(reader.weight(name, None, inputs)), whole[:, inputs])
            assert torch.equal(dequantize(reader.weight(name, outputs, inputs)), whole[outputs, inputs])


@pytest.mark.parametrize("name", ["awq-128", "gptq-8-128"])
def test_the_next_start_takes_packed_weights_from_the_cache(base: Path, tmp_path: Path, name: str) -> None:
    layout = LAYOUTS[name]
    path = write_checkpoint(tmp_path / "model", base, layout_tensors(base, layout)[0], layout.config)
    (tmp_path / "cache").mkdir()
    cache = WeightCache(tmp_path / "cache", 2**30, smallest=0)
    first = _logits(_load(path, cache=cache))
    assert list((tmp_path / "cache").glob(f"*-{layout.auto}-*.safetensors"))
    assert torch.equal(_logits(_load(path, cache=cache)), first)


def test_the_log_says_what_becomes_of_the_weights(base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    said = {
        "awq-64": "stores weights as awq, 4 bits, groups of 64: they are kept as int4",
        "gptq-4-64-act-order": "gptq, 4 bits, groups of 64, act-order: they are dequantized to float32",
        "nf4-double": "stores weights as bitsandbytes nf4, double quantization: they are dequantized to float32",
        "w8a16-128-asymmetric": "no kernel keeps model.layers.0.self_attn.q_proj.weight as it is stored, so it is "
        "dequantized to float32, and so are others like it",
    }
    for name, expected in said.items():
        layout = LAYOUTS[name]
        path = write_checkpoint(tmp_path / name, base, layout_tensors(base, layout)[0], layout.config)
        caplog.clear()
        with caplog.at_level("INFO", "octavo.worker"):
            _load(path)
        assert caplog.text.count(expected) == 1, caplog.text


def test_scales_beyond_float16_are_dequantized(base: Path, tmp_path: Path) -> None:
    """bfloat16 has larger and smaller numbers than float16: a rounded scale would be another weight."""
    layout = LAYOUTS["w4a16-128"]
    stored, _ = layout_tensors(base, layout)
    stored[f"{Q.removesuffix('weight')}weight_scale"] *= 2.0**-40
    path = write_checkpoint(tmp_path, base, stored, layout.config)
    reader = _reader(path, "int4")
    assert isinstance(reader.weight(DOWN), Int4Weight)
    assert torch.equal(_tensor(reader.weight(Q)), _source(path).tensor(Q).bfloat16())


def test_layers_that_are_left_out_stay_floats(base: Path, tmp_path: Path) -> None:
    """AWQ names them; GPTQ's config does not, and its files do."""
    floats = layout_tensors(base, LAYOUTS["nf4"])[1]
    for name, change in (("awq-64", {"modules_to_not_convert": ["down_proj"]}), ("gptq-4-128", {})):
        layout = LAYOUTS[name]
        stored, _ = layout_tensors(base, layout)
        for layer in (0, 1):
            prefix = f"model.layers.{layer}.mlp.down_proj."
            stored = {name: tensor for name, tensor in stored.items() if not name.startswith(prefix)}
            stored[f"{prefix}weight"] = floats[f"{prefix}weight"]
        path = write_checkpoint(tmp_path / name, base, stored, {**layout.config, **change})
        reader = _reader(path, "int4")
        assert isinstance(reader.weight(Q), Int4Weight)
        assert torch.equal(_tensor(reader.weight(DOWN)), floats[DOWN].bfloat16())
        assert _logits(_load(path)).isfinite().all()


def test_autogptqs_biases_of_zeros_are_no_tensors_of_another_model(base: Path, tmp_path: Path) -> None:
    layout = LAYOUTS["gptq-4-128"]
    stored, _ = layout_tensors(base, layout)
    bias = f"{Q.removesuffix('weight')}bias"
    stored[bias] = torch.zeros(192, dtype=torch.float16)
    _load(write_checkpoint(tmp_path, base, stored, layout.config))
    stored[bias][3] = 1
    with pytest.raises(WeightsError, match=rf"1 tensors are not of this architecture: {bias}"):
        _load(write_checkpoint(tmp_path, base, stored, layout.config))


def test_gpt_oss_blocks_of_an_expert(tmp_path: Path) -> None:
    """Numbers and scales as gpt-oss's files have them; 8 bits express them, 4 bits with minima do not."""
    from safetensors.torch import save_file

    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    blocks, scales, floats = mxfp4(torch.randn(40, 96, generator=torch.Generator().manual_seed(0)) * 0.02)
    stored = {name.replace("weight", "blocks"): blocks, name.replace("weight", "scales"): scales}
    save_file(stored, tmp_path / "model.safetensors")
    quantization = StoredQuantization(schemes=((("Linear",), MXFP4_BLOCKS),))
    source = SafetensorsSource(SafetensorsFiles(tmp_path), quantization, {name: (40, 96)})
    assert source.shapes == {name: (40, 96)}
    assert torch.equal(source.tensor(name), floats)
    assert torch.equal(source.tensor(name, None, slice(7, 30)), floats[7:30])
    weight = source.weight(name)
    assert isinstance(weight, Int8Weight)
    assert torch.equal(dequantize(weight), floats)
    assert torch.equal(dequantize(slice_inputs(weight, slice(32, 96))), floats[:, 32:])


@pytest.mark.parametrize("name", ["awq-32", "gptq-4-64-act-order", "w8a16-64", "nf4-double", "llm-int8"])
def test_phi3_files_pack_layers_with_the_same_input_as_one(tmp_path: Path, name: str) -> None:
    """Rows of q, k and v begin within words of zero points; all are read as parts of one packed layer."""
    torch.manual_seed(0)
    shape = {**SHAPE, "hidden_size": 192, "num_attention_heads": 3, "pad_token_id": 0, "bos_token_id": 1}
    shape.pop("head_dim")
    Phi3ForCausalLM(Phi3Config(**shape, original_max_position_embeddings=128)).save_pretrained(tmp_path / "floats")
    layout = LAYOUTS[name]
    stored, _ = layout_tensors(tmp_path / "floats", layout)
    path = write_checkpoint(tmp_path / "packed", tmp_path / "floats", stored, layout.config)
    config = config_from_directory(path)
    shapes = LlamaModel.tensor_shapes(config)
    source = SafetensorsSource(Phi3Files(path), stored_quantization(read_json(path / "config.json")), shapes)
    floats = {name: source.tensor(name).clone() for name in shapes}
    fused: Tensors = {}
    for tensor, value in floats.items():
        if "_proj" not in tensor or "o_proj" in tensor or "down_proj" in tensor:
            fused[tensor] = value
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        for whole, parts in (("self_attn.qkv", "self_attn.{}"), ("mlp.gate_up", "mlp.{}")):
            names = ("q", "k", "v") if "qkv" in whole else ("gate", "up")
            tensors = [floats[f"{prefix}.{parts.format(each)}_proj.weight"] for each in names]
            fused[f"{prefix}.{whole}_proj.weight"] = torch.cat(tensors)
    of_floats = write_checkpoint(tmp_path / "fused", tmp_path / "floats", fused, None)
    assert torch.equal(_logits(_load(path, "none")), _logits(_load(of_floats)))
    assert _load(path).quantization == layout.auto
    assert _logits(_load(path)).isfinite().all()
