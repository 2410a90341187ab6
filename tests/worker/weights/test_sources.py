import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from kernels.linear.weights import Int8Weight
from runtime.model_files import ModelFiles, resolve_model
from runtime.tokenizer.gguf_header import StoredTensor
from tests.support.models.gguf_files import write_gguf
from tests.support.models.model_runs import ModelRun, relative_error
from worker.models.gguf_source import GGUFSource, Part
from worker.models.loader import LoadedModel, load_model
from worker.weights.digest import dated_digest, files_digest
from worker.weights.quantization.kinds import Quantization
from worker.weights.reader import WeightsError
from worker.weights.safetensors_files import SafetensorsFiles
from worker.weights.source import DummySource, SourceReader

HIDDEN, HEADS, KV_HEADS, HEAD, FFN, VOCAB = 256, 4, 2, 64, 512, 80


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config)
    for parameter in model.parameters():
        parameter.data.normal_(0.5, 0.5)
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def _load(path: Path, *, dtype: torch.dtype = torch.float32, **options: Any) -> LoadedModel:
    return load_model(resolve_model(str(path)), dtype=dtype, **options)


def _logits(loaded: LoadedModel) -> torch.Tensor:
    run = ModelRun(loaded)
    return run.step([(run.row([3, 1, 4, 1, 5], 5), 5)])


def _change(path: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


# --- safetensors


def test_shards_give_what_one_file_gives(directory: Path) -> None:
    whole = _load(directory)
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, directory / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "model.safetensors").unlink()
    sharded = _load(directory)
    assert torch.equal(_logits(sharded), _logits(whole))
    assert sharded.digest != whole.digest

    (directory / "b.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"1 of the 2 shards in model\.safetensors\.index\.json are missing: b\."):
        _load(directory)


def test_an_index_cannot_name_files_elsewhere(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../x.safetensors"}}))
    with pytest.raises(WeightsError, match="is not a file name"):
        _load(directory)


def test_progress_ends_at_one(directory: Path) -> None:
    seen: list[float] = []
    _load(directory, progress=seen.append)
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (0.0, 1.0)


def test_digest_follows_content(directory: Path) -> None:
    digest = _load(directory).digest
    assert _load(directory).digest == digest
    _change(directory, lambda tensors: tensors["model.norm.weight"].add_(1e-3))
    assert _load(directory).digest != digest


def test_the_digest_of_a_large_file_sees_its_edges_and_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.weights.digest.WHOLE_BELOW", 64)
    monkeypatch.setattr("worker.weights.digest.EDGE", 16)
    file = tmp_path / "w.safetensors"
    digests = set()
    for content in (b"a" * 100, b"a" * 101, b"b" + b"a" * 99, b"a" * 99 + b"b"):
        file.write_bytes(content)
        digests.add(files_digest([file]))
    assert len(digests) == 4


def test_what_a_large_file_holds_between_its_edges_is_told_by_the_time_of_its_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise packed weights of an earlier start would be used for a replaced file."""
    monkeypatch.setattr("worker.weights.digest.WHOLE_BELOW", 64)
    monkeypatch.setattr("worker.weights.digest.EDGE", 16)
    large, small = tmp_path / "large.gguf", tmp_path / "small.gguf"
    digests: list[tuple[str, str]] = []
    for nanoseconds, content in ((1, b"a" * 100), (2, b"a" * 50 + b"b" + b"a" * 49)):
        large.write_bytes(content)
        small.write_bytes(b"c")
        os.utime(large, ns=(0, nanoseconds))
        os.utime(small, ns=(0, nanoseconds))
        digests.append((dated_digest(files_digest([large]), [large]), dated_digest(files_digest([small]), [small])))
    assert digests[0][0] != digests[1][0]
    assert digests[0][1] == digests[1][1], "the date of a small file counts, although it is read whole"


def test_missing_unexpected_and_misshapen_tensors_are_named(directory: Path) -> None:
    _change(directory, lambda tensors: tensors.update({"model.extra.weight": torch.zeros(2)}))
    with pytest.raises(WeightsError, match=r"1 tensors are not of this architecture: model\.extra\.weight"):
        _load(directory)
    _change(directory, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(7)}))
    with pytest.raises(WeightsError, match=r"model\.norm\.weight has shape \[7\]; the config asks for \[256\]"):
        _load(directory)
    names = [f"model.layers.1.mlp.{name}_proj.weight" for name in ("up", "down")]
    _change(directory, lambda tensors: [tensors.pop(name) for name in names])
    with pytest.raises(WeightsError, match=r"lacks 2 of 25 tensors: model\.layers\.1\.mlp\.up_proj\.weight"):
        _load(directory)


@pytest.mark.parametrize("keep", [0, 4, 100, 5000, -1])
def test_a_safetensors_file_cut_short(directory: Path, keep: int) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(WeightsError, match=r"model\.safetensors: damaged or cut short"):
        _load(directory)


def _stored(entries: str, num_bytes: int = 64) -> bytes:
    return struct.pack("<Q", len(entries)) + entries.encode() + bytes(num_bytes)


def _entry(name: str, begin: int, end: int) -> str:
    return f'"{name}": {{"dtype": "F32", "shape": [{(end - begin) // 4}], "data_offsets": [{begin}, {end}]}}'


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        # Its library takes one of the two.
        ([_entry("b", 0, 32), _entry("a", 0, 32), _entry("a", 32, 64)], "'a' is there twice"),
        ([_entry("a", 0, 32), _entry("a", 32, 64)], "damaged"),
        (['"__metadata__": {"x": "1", "x": "2"}', _entry("a", 0, 64)], "'x' is there twice"),
        ([_entry("a", 0, 64), _entry("b", 32, 64)], "damaged or cut short"),
        ([_entry("a", 0, 32), _entry("b", 48, 64)], "damaged or cut short"),
        ([_entry("a", 0, 2**62)], "damaged or cut short"),
    ],
)
def test_a_safetensors_header_with_two_readings(tmp_path: Path, entries: list[str], words: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(_stored("{" + ", ".join(entries) + "}"))
    with pytest.raises(WeightsError, match=rf"model\.safetensors: .*{words}"):
        SafetensorsFiles(tmp_path)


def test_a_tensor_is_in_one_file_the_one_that_the_index_says(tmp_path: Path) -> None:
    for file, name in (("1.safetensors", "a"), ("2.safetensors", "b")):
        save_file({name: torch.ones(2), f"{name}.own": torch.ones(2)}, tmp_path / file)
    assert sorted(SafetensorsFiles(tmp_path).shapes) == ["a", "a.own", "b", "b.own"]
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}')
    assert sorted(SafetensorsFiles(tmp_path).shapes) == ["a", "a.own", "b", "b.own"]
    index.write_text('{"weight_map": {"a": "2.safetensors", "b": "1.safetensors"}}')
    with pytest.raises(WeightsError, match=r"a is in 1\.safetensors, and .*index\.json says 2\.safetensors: keep one"):
        SafetensorsFiles(tmp_path)
    index.write_text('{"weight_map": {"a": "1.safetensors", "a": "2.safetensors"}}')
    with pytest.raises(WeightsError, match=r"index\.json: not an index with a weight_map: 'a' is there twice"):
        SafetensorsFiles(tmp_path)
    index.unlink()
    save_file({"a": torch.zeros(2)}, tmp_path / "3.safetensors")
    with pytest.raises(WeightsError, match=r"a is in 3\.safetensors, and in 1\.safetensors, too: keep one of them"):
        SafetensorsFiles(tmp_path)


def test_no_weights_and_wrong_formats(directory: Path) -> None:
    with pytest.raises(WeightsError, match="load_format='gguf' does not fit"):
        _load(directory, load_format="gguf")
    with pytest.raises(WeightsError, match=r"dtype=torch\.float16 is not supported"):
        _load(directory, dtype=torch.float16)
    _change(directory, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(HIDDEN, dtype=torch.int32)}))
    with pytest.raises(WeightsError, match=r"model\.norm\.weight is stored as I32; F32, BF16"):
        _load(directory)
    (directory / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"no \*\.safetensors file"):
        _load(directory)


def test_dummy_weights_need_a_config_only(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    first, second = (_load(directory, load_format="dummy") for _ in range(2))
    assert torch.equal(_logits(first), _logits(second))
    assert first.digest == second.digest
    assert _logits(first).isfinite().all()


# --- GGUF


@pytest.mark.parametrize(
    ("kind", "tolerance"), [("F32", 1e-6), ("F16", 2e-2), ("BF16", 1e-1), ("Q8_0", 1e-1), ("Q4_0", 1.0), ("Q4_1", 1.0)]
)
def test_gguf_gives_what_safetensors_gives(directory: Path, tmp_path: Path, kind: str, tolerance: float) -> None:
    """F32 is exact; others are as near as the format allows (Q4 here only proves that shapes and names fit)."""
    path = write_gguf(tmp_path / "m.gguf", directory, gguf.GGMLQuantizationType[kind])
    assert relative_error(_logits(_load(path)), _logits(_load(directory))) <= tolerance


@pytest.mark.parametrize(
    "kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]
)
def test_quantized_tensors_are_dequantized_as_gguf_does(tmp_path: Path, directory: Path, kind: str) -> None:
    """Random bytes with finite scales, because gguf cannot quantize to the K formats."""
    quantization = gguf.GGMLQuantizationType[kind]
    path = write_gguf(tmp_path / "m.gguf", directory, gguf.GGMLQuantizationType.Q8_0)
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[quantization]
    rows = np.random.default_rng(0).integers(0, 40, (3, 512 // block_values * block_bytes), dtype=np.uint8)
    file = tmp_path / "rows"
    file.write_bytes(b"\0" * 32 + rows.tobytes())
    source = GGUFSource(path)
    source._data = file.read_bytes()  # pyright: ignore[reportAttributeAccessIssue]
    source._parts["rows"] = Part(StoredTensor(quantization, (3, 512), 32, rows.nbytes), (3, 512))
    values = source.tensor("rows").numpy()
    assert np.array_equal(values, gguf.dequantize(rows, quantization))


def test_a_gguf_file_cut_anywhere_or_with_any_byte_changed_is_refused_in_words(directory: Path, tmp_path: Path) -> None:
    """No damage may cause a traceback from numpy or struct, an endless loop, or gigabytes of memory."""
    path = write_gguf(tmp_path / "m.gguf", directory, gguf.GGMLQuantizationType.Q8_0)
    data = path.read_bytes()
    damaged = tmp_path / "damaged.gguf"
    files = ModelFiles(path=damaged, name="damaged")
    for keep in (0, 3, 8, 20, 100, 400, 3000, len(data) // 2, len(data) - 1):
        damaged.write_bytes(data[:keep])
        with pytest.raises(WeightsError, match=r"damaged\.gguf: "):
            load_model(files, dtype=torch.float32)
    for position in range(0, 700, 3):
        changed = bytearray(data)
        changed[position] ^= 0xFF
        damaged.write_bytes(changed)
        try:
            load_model(files, dtype=torch.float32)
        except WeightsError as error:
            assert "damaged.gguf: " in str(error)  # noqa: PT017 - changes of a text or number are not refused


def test_gguf_quantizations_and_models_that_are_not_supported_are_named(directory: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", directory, gguf.GGMLQuantizationType.TQ2_0)
    with pytest.raises(WeightsError, match=r"quantization TQ2_0 \(.*weight\) is not supported; F32, F16, BF16, Q8_0"):
        _load(path)
    path = write_gguf(tmp_path / "g.gguf", directory, gguf.GGMLQuantizationType.F32, arch="stablelm")
    with pytest.raises(WeightsError, match=r"g\.gguf: general\.architecture='stablelm' is not supported"):
        _load(path)
    (tmp_path / "not.gguf").write_bytes(b"PK\3\4" + b"\0" * 100)
    with pytest.raises(WeightsError, match="not a GGUF file"):
        _load(tmp_path / "not.gguf")
    with pytest.raises(WeightsError, match="load_format='safetensors' does not fit"):
        _load(path, load_format="safetensors")


def test_a_tied_head_is_the_memory_of_the_embeddings(tmp_path: Path):
    """Otherwise it would take a gigabyte from the KV cache of some models on a GPU."""
    name, shapes = "model.embed_tokens.weight", {"model.embed_tokens.weight": (64, 32)}

    def take(quantization: Quantization) -> SourceReader:
        return SourceReader(DummySource(tmp_path, shapes), shapes, torch.bfloat16, quantization, lambda fraction: None)

    floats, int8 = take("none"), take("int8")
    table_VE = floats(name)
    assert floats.head_weight(name) is table_VE
    assert isinstance(int8(name), torch.Tensor)
    assert isinstance(int8.head_weight(name), Int8Weight), "another kind, and other memory"
