"""quantization=fp8: weights kept as stored, quantized at load, left in floats, or refused; and the scales of KV."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file

from kernels.backend import Backend, GpuBackend, gpu_backend
from kernels.cpu_backend import cpu_backend
from kernels.gemm.quantize import checks
from kernels.gemm.quantize.reference import quantize_blocks, quantize_tensor, quantize_tokens
from kernels.linear.weights import Fp8Weight, Weight, dequantize, quantize_fp8
from runtime.model_files import resolve_model
from tests.support.models.fp8_models import (
    CONFIG,
    DEEPSEEK,
    LEFT_OUT,
    Tensors,
    compressed,
    float_tensors,
    write_checkpoint,
)
from tests.support.models.gguf_files import write_gguf
from worker.models.config import config_from_directory
from worker.models.families.llama import LlamaModel
from worker.models.gguf_source import GGUFSource
from worker.models.loader import load_model
from worker.weights.quantization.kinds import Quantization, QuantizationOption, resolve_quantization
from worker.weights.quantization.methods import stored_quantization
from worker.weights.reader import Shape, WeightsError
from worker.weights.safetensors_files import SafetensorsFiles
from worker.weights.safetensors_source import SafetensorsSource
from worker.weights.source import SourceReader, TensorSource, check_tensors

ATTENTION = "model.layers.0.self_attn"
Q, DOWN = f"{ATTENTION}.q_proj.weight", f"{LEFT_OUT}.weight"
GPU = gpu_backend(torch.bfloat16, torch.device("cpu"))


def _source(path: Path) -> SafetensorsSource:
    config = json.loads((path / "config.json").read_text())
    shapes = LlamaModel.tensor_shapes(config_from_directory(path))
    return SafetensorsSource(SafetensorsFiles(path), stored_quantization(config), shapes)


def _reader(source: TensorSource, quantization: Quantization = "fp8", device: str = "cpu") -> SourceReader:
    shapes = {name: tuple(shape) for name, shape in source.shapes.items()}
    return SourceReader(source, shapes, torch.bfloat16, quantization, lambda fraction: None, torch.device(device))


# --- weights


@pytest.mark.parametrize("how", ["channel", "tensor", "block"])
def test_what_is_stored_in_e4m3_is_kept_to_the_bit(tmp_path: Path, how: str) -> None:
    checkpoint = write_checkpoint(tmp_path, how)
    reader = _reader(_source(checkpoint.path))
    config = json.loads((tmp_path / "config.json").read_text())
    assert stored_quantization(config).made_for == "fp8"
    assert (len(checkpoint.fp8), DOWN in checkpoint.fp8) == ((13, False) if how == "channel" else (14, True))
    for name, (values, scales) in checkpoint.fp8.items():
        weight = reader.weight(name)
        assert isinstance(weight, Fp8Weight)
        assert torch.equal(weight.values_OI.view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(weight.scales, scales.reshape(weight.scales.shape))
        assert weight.has_blocks is (how == "block")


def test_layers_left_out_embeddings_norms_and_the_head_stay_floats(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, "channel")
    reader = _reader(_source(checkpoint.path))
    norm, embeddings, head = "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"
    for name, taken in {
        DOWN: reader.weight(DOWN),
        norm: reader(norm),
        embeddings: reader(embeddings),
        head: reader.head_weight(head),
    }.items():
        assert isinstance(taken, torch.Tensor)
        assert torch.equal(taken, checkpoint.floats[name].bfloat16())


def test_floats_are_quantized_from_what_is_stored(tmp_path: Path) -> None:
    """The head is not quantized; in a checkpoint of floats no other layer is left out."""
    checkpoint = write_checkpoint(tmp_path, "online")
    reader = _reader(_source(checkpoint.path))
    for name in (Q, DOWN):
        weight, expected = reader.weight(name), quantize_fp8(checkpoint.floats[name])
        assert isinstance(weight, Fp8Weight)
        assert torch.equal(dequantize(weight), dequantize(expected))
        assert weight.scales.shape == (len(checkpoint.floats[name]), 1)
    assert isinstance(reader.head_weight("lm_head.weight"), torch.Tensor)


@pytest.mark.parametrize("how", ["online", "channel", "block"])
def test_all_is_on_the_device_that_computes(tmp_path: Path, how: str) -> None:
    """A meta device has no numbers: reading one to quantize would fail."""
    reader = _reader(_source(write_checkpoint(tmp_path, how).path), device="meta")
    weights = [reader.weight(Q), reader.weight(DOWN), reader.head_weight("lm_head.weight"), reader("model.norm.weight")]
    for weight in weights:
        parts = (weight,) if isinstance(weight, torch.Tensor) else (weight.values_OI, cast(Fp8Weight, weight).scales)
        assert {part.device.type for part in parts} == {"meta"}


def test_gguf_files_are_quantized_from_their_floats_not_from_bfloat16(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "floats", "online").path
    source = GGUFSource(write_gguf(tmp_path / "m.gguf", path, Kind.Q8_0, arch="qwen3"))
    weight = _reader(source).weight(Q)
    assert isinstance(weight, Fp8Weight)
    assert torch.equal(dequantize(weight), dequantize(quantize_fp8(source.tensor(Q))))
    assert not torch.equal(dequantize(weight), dequantize(quantize_fp8(source.tensor(Q).bfloat16())))


def test_blocks_of_another_size_are_quantized_anew(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, "block")
    stored = {
        name: torch.rand(-(-values.shape[0] // 64), -(-values.shape[1] // 64))
        for name, (values, _) in checkpoint.fp8.items()
    }
    tensors = checkpoint.stored | {name.removesuffix("weight") + "weight_scale_inv": s for name, s in stored.items()}
    _write(tmp_path, tensors, DEEPSEEK | {"weight_block_size": [64, 64]})
    source = _source(tmp_path)
    weight = _reader(source).weight(Q)
    assert isinstance(weight, Fp8Weight)
    assert torch.equal(dequantize(weight), dequantize(quantize_fp8(source.tensor(Q))))
    assert stored_quantization(json.loads((tmp_path / "config.json").read_text())).made_for == "none"


@pytest.mark.parametrize(
    ("stored", "shape", "is_fp8"),
    [
        ("floats", (256, 384), True),
        ("floats", (256, 192), False),
        ("floats", (192, 256), False),
        ("tensor", (256, 384), True),
        ("block", (256, 384), True),
        ("block", (192, 256), False),
        ("channel", (256, 384), False),
    ],
)
def test_experts_are_in_blocks_or_floats(stored: str, shape: tuple[int, int], is_fp8: bool) -> None:
    """Weights stored in e4m3 are not rounded again."""
    floats = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * torch.logspace(0, 1, shape[1])
    weight: Weight = floats
    if stored != "floats":
        values, scales = {"tensor": quantize_tensor, "block": quantize_blocks, "channel": quantize_tokens}[stored](
            floats
        )
        weight = Fp8Weight(values_OI=values, scales=scales.reshape(1, 1) if stored == "tensor" else scales)
    expert = _reader(_Experts(weight)).weight("model.layers.0.mlp.experts.3.up_proj.weight")
    assert isinstance(expert, Fp8Weight) is is_fp8
    if isinstance(expert, Fp8Weight):
        assert expert.has_blocks
    if stored != "floats" or not is_fp8:
        assert torch.equal(dequantize(expert), dequantize(weight))
    else:
        values, scales = quantize_blocks(floats)
        assert torch.equal(dequantize(expert), dequantize(Fp8Weight(values_OI=values, scales=scales)))


@dataclass
class _Experts:
    """A TensorSource with one weight."""

    stored: Weight
    path: Path = Path("experts")
    shapes: dict[str, Shape] = field(default_factory=lambda: {"model.layers.0.mlp.experts.3.up_proj.weight": (1,)})

    def tensor(self, name: str, dtype: torch.dtype | None = None, rows: slice | None = None) -> torch.Tensor:
        assert rows is None
        return dequantize(self.stored).to(dtype or torch.float32)

    def weight(self, name: str, rows: slice | None = None) -> Weight:
        assert rows is None
        return self.stored

    def is_left_out(self, name: str) -> bool:
        return False

    def is_packed_for(self, quantization: Quantization) -> bool:
        return False

    def kv_scale(self, attention: str) -> None:
        return None


def _write(path: Path, tensors: Tensors, quantization: dict[str, Any] | None) -> None:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": quantization}))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")


# --- which quantization


@pytest.mark.parametrize(
    ("made_for", "on_cpu", "on_gpu"), [("none", "none", "none"), ("int8", "int8", "none"), ("fp8", "none", "fp8")]
)
def test_auto_is_what_the_checkpoint_was_made_for_where_that_is_computed(
    made_for: Quantization, on_cpu: str, on_gpu: str
) -> None:
    assert resolve_quantization("auto", made_for, cpu_backend(torch.float32, 64)) == on_cpu
    assert resolve_quantization("auto", made_for, GPU) == on_gpu


def test_what_a_gpu_does_not_compute_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "online")
    says = (
        r"quantization=int8 is computed on a CPU only, and this is a GPU \(triton-\S+\): use quantization=fp8, or one "
        "of auto, none, fp8, int4$"
    )
    with pytest.raises(WeightsError, match=says):
        load_model(resolve_model(str(tmp_path)), dtype=torch.bfloat16, quantization="int8", make_backend=lambda _: GPU)


def test_a_cpu_refuses_fp8_and_says_that_int8_works(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "block")
    with pytest.raises(
        WeightsError,
        match=r"quantization=fp8 is computed on a GPU only, and this is a CPU \(cpu-\S+\): use quantization=int8",
    ):
        load_model(resolve_model(str(tmp_path)), dtype=torch.float32, quantization="fp8")


def test_a_gpu_without_e4m3_is_refused_fp8_and_auto_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    ampere = Backend(
        name="triton-sm80-bfloat16",
        compute_dtype=torch.bfloat16,
        kv_cache_dtype=torch.bfloat16,
        gpu=GpuBackend(device=torch.device("cuda")),
    )
    monkeypatch.setattr(checks, "_capability", lambda device: 80)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    assert resolve_quantization("auto", "fp8", ampere) == "none"
    with pytest.raises(
        WeightsError, match=r"quantization=fp8: NVIDIA A100 .* 8\.0, FP8 needs .* quantization=none work"
    ):
        resolve_quantization("fp8", "fp8", ampere)


def test_every_option_is_known_to_a_path() -> None:
    for option in cast(tuple[QuantizationOption, ...], ("none", "int8", "int4", "fp8")):
        paths = [path for path in (cpu_backend(torch.float32, 64), GPU) if _computes(option, path)]
        assert len(paths) == (2 if option in ("none", "int4") else 1)


def _computes(option: QuantizationOption, backend: Backend) -> bool:
    try:
        return resolve_quantization(option, "none", backend) == option
    except WeightsError:
        return False


# --- scales of a KV cache


def _with_kv_scales(path: Path, scales: Tensors, quantization: dict[str, Any] | None = None) -> SafetensorsSource:
    _write(path, float_tensors() | {f"{ATTENTION}.{name}": scale for name, scale in scales.items()}, quantization)
    source = _source(path)
    check_tensors(source, LlamaModel.tensor_shapes(config_from_directory(path)), tied=False)
    return source


@pytest.mark.parametrize(
    ("k_name", "v_name"),
    [
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
    ],
)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_scales_of_kv_are_found_by_each_name(tmp_path: Path, k_name: str, v_name: str, shape: tuple[int, ...]) -> None:
    source = _with_kv_scales(
        tmp_path, {k_name: torch.full(shape, 0.25), v_name: torch.full(shape, 0.5, dtype=torch.bfloat16)}
    )
    assert _reader(source, "none").kv_scale(ATTENTION) == (0.25, 0.5)
    assert source.kv_scale("model.layers.1.self_attn") is None


def test_one_scale_for_keys_and_values(tmp_path: Path) -> None:
    scheme = compressed("tensor", config_groups={}, kv_cache_scheme={"num_bits": 8, "type": "float"})
    source = _with_kv_scales(tmp_path, {"kv_scale": torch.tensor(0.125)}, scheme)
    assert source.kv_scale(ATTENTION) == (0.125, 0.125)


@pytest.mark.parametrize(
    ("scales", "says"),
    [
        ({"k_scale": torch.tensor(0.5)}, rf"{ATTENTION}\.v_scale is missing beside {ATTENTION}\.k_scale; a KV cache"),
        ({"v_scale": torch.tensor(0.5)}, rf"{ATTENTION}\.k_scale is missing beside {ATTENTION}\.v_scale"),
        ({"kv_scale": torch.tensor(0.0)}, r"kv_scale is 0\.0: a scale must be positive"),
        ({"kv_scale": torch.tensor(torch.nan)}, r"kv_scale is nan: a scale must be positive"),
        ({"kv_scale": torch.ones(2)}, r"kv_scale has shape \[2\]: only one scale per layer is supported"),
    ],
)
def test_scales_of_kv_that_make_no_sense_are_named(tmp_path: Path, scales: Tensors, says: str) -> None:
    source = _with_kv_scales(tmp_path, scales)
    with pytest.raises(WeightsError, match=says):
        source.kv_scale(ATTENTION)
