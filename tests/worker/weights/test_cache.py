"""Packed weights of an earlier start: the next start computes the same bits with them, and no damage to the files keeps
a worker from starting."""

import json
import os
import shutil
import stat
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from configs.options import Options
from runtime.model_files import resolve_model
from tests.support.kernels.kernel_paths import native
from tests.support.models.model_runs import ModelRun
from tests.support.repository import ROOT
from worker.models.config import config_from_directory
from worker.models.loader import LoadedModel, load_model
from worker.models.registry import model_class
from worker.process.build import build_runner
from worker.weights import cache as cache_module
from worker.weights import digest
from worker.weights.cache import WeightCache
from worker.weights.quantization.kinds import QuantizationOption
from worker.weights.safetensors_source import SafetensorsSource

# Biases, an untied output head, and sizes that are no multiples of a panel's.
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 83,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}


@pytest.fixture(autouse=True)
def kernels() -> None:
    """Skips without C++ kernels: oneDNN's packed weights cannot be kept."""
    native()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    config = config_from_directory(directory)
    generator = torch.Generator().manual_seed(0)
    shapes = model_class(config.architecture).tensor_shapes(config)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    directory = tmp_path / "kept"
    directory.mkdir(mode=0o700)
    return directory


def _load(
    model: Path, kept: Path | None, quantization: QuantizationOption = "none", *, max_bytes: int = 2**30
) -> LoadedModel:
    cache = None if kept is None else WeightCache(kept, max_bytes, smallest=0)
    return load_model(resolve_model(str(model)), dtype=torch.bfloat16, quantization=quantization, cache=cache)


def _logits(loaded: LoadedModel) -> torch.Tensor:
    run = ModelRun(loaded, dtype=torch.bfloat16)
    return run.step([(run.row([3, 1, 4, 1, 5], 5), 5)])


def _files(kept: Path) -> list[Path]:
    return sorted(kept.glob("*.safetensors"))


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_the_next_start_computes_the_same_bits_and_reads_no_checkpoint(
    model: Path, kept: Path, quantization: QuantizationOption, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = _logits(_load(model, None, quantization))
    assert torch.equal(_logits(_load(model, kept, quantization)), fresh)
    (file,) = _files(kept)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600

    def read(self: SafetensorsSource, name: str) -> torch.Tensor:
        raise AssertionError(f"{name} was read from the checkpoint")

    monkeypatch.setattr(SafetensorsSource, "tensor", read)
    monkeypatch.setattr(SafetensorsSource, "weight", read)
    assert torch.equal(_logits(_load(model, kept, quantization)), fresh)


def test_progress_goes_to_the_end_either_way(model: Path, kept: Path) -> None:
    for _ in range(2):
        seen: list[float] = []
        cache = WeightCache(kept, 2**30, smallest=0)
        load_model(resolve_model(str(model)), dtype=torch.float32, cache=cache, progress=seen.append)
        assert seen[-1] == 1.0
        assert seen == sorted(seen)


def test_the_file_is_one_that_the_safetensors_library_reads(model: Path, kept: Path) -> None:
    _load(model, kept)
    with safe_open(_files(kept)[0], "pt") as file:
        embeddings = file.get_tensor("model.embed_tokens.weight")
        assert file.get_tensor("packed:lm_head.weight").dtype is torch.uint8
    with safe_open(model / "model.safetensors", "pt") as file:
        assert torch.equal(embeddings, file.get_tensor("model.embed_tokens.weight").bfloat16())


def _flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


def _cut(path: Path, num_bytes: int) -> None:
    os.truncate(path, path.stat().st_size - num_bytes)


DAMAGES = {
    "a bit of the last tensor": lambda path: _flip(path, -1),
    "a bit in the middle": lambda path: _flip(path, path.stat().st_size // 2),
    "a bit of the header's length": lambda path: _flip(path, 2),
    "a bit of its opening brace": lambda path: _flip(path, 8),
    "the number of a layer's inputs": lambda path: path.write_bytes(
        path.read_bytes().replace(b'num_inputs\\\\\\": 72', b'num_inputs\\\\\\": 73', 1)
    ),
    "its checksums": lambda path: path.write_bytes(path.read_bytes().replace(b'"crc32": "{', b'"crc32": "[', 1)),
    "its end is missing": lambda path: _cut(path, 100),
    "empty": lambda path: path.write_bytes(b""),
    "of another kind": lambda path: path.write_bytes(b"\x80\x04pickle" * 100),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_made_anew_with_a_warning(
    model: Path, kept: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    fresh = _logits(_load(model, kept))
    (file,) = _files(kept)
    whole = file.read_bytes()
    DAMAGES[damage](file)
    assert file.is_dir() or file.read_bytes() != whole
    assert torch.equal(_logits(_load(model, kept)), fresh)
    assert "weights are packed again" in caplog.text
    assert str(file) in caplog.text
    if damage != "a directory":  # the worker must not delete a directory that is not its own
        assert file.read_bytes() == whole


def test_another_checkpoint_or_other_sources_are_packed_anew(
    model: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _logits(_load(model, kept))
    (first,) = _files(kept)
    for sources in ("0" * 16, "1" * 16):
        monkeypatch.setattr(cache_module, "_sources_digest", lambda sources=sources: sources)
        assert torch.equal(_logits(_load(model, kept)), before)
        if sources == "0" * 16:
            os.utime(first, (1, 1))
    assert {file.stem[-16:] for file in _files(kept)} == {"0" * 16, "1" * 16}, "a file unused for a day is kept"
    with safe_open(model / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) * 2 for name in file.keys()}  # noqa: SIM118 - it is no dictionary
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    assert not torch.equal(_logits(_load(model, kept)), before)
    assert len(_files(kept)) == 3


def test_the_least_recently_used_goes_when_room_is_short(model: Path, kept: Path) -> None:
    _load(model, kept, "none")
    (first,) = _files(kept)
    size = first.stat().st_size
    _load(model, kept, "int8")
    os.utime(first, (1, 1))
    _load(model, kept, "none")  # using the first file makes it the younger one again
    (second,) = {*_files(kept)} - {first}
    os.utime(second, (2, 2))
    _load(model, kept, "int4", max_bytes=size + second.stat().st_size + 1024)
    assert first in _files(kept)
    assert second not in _files(kept)
    assert len(_files(kept)) == 2
    _load(model, kept, "int8", max_bytes=size // 4)
    assert len(_files(kept)) == 2, "a model larger than max_bytes is kept, or has driven out another"


def test_what_a_killed_process_left_is_removed(model: Path, kept: Path) -> None:
    (kept / ".writing-abc").write_bytes(b"half")
    _load(model, kept)
    assert not list(kept.glob(".writing-*"))


def test_a_full_disk_is_a_warning(
    model: Path, kept: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**30, 2**30, 0))
    _load(model, kept)
    assert "0.0 GiB left" in caplog.text
    assert "weight_cache=0" in caplog.text
    assert not _files(kept)


def test_a_disk_that_fills_up_meanwhile_leaves_nothing(
    model: Path, kept: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def write(file: object, *_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_module, "write_weight_file", write)
    _load(model, kept)
    assert "No space left on device" in caplog.text
    assert [file.name for file in kept.iterdir()] == ["lock"]


START = """
import sys
from pathlib import Path
import torch
from runtime.model_files import resolve_model
from tests.support.models.model_runs import ModelRun
from worker.models.loader import load_model
from worker.weights.cache import WeightCache

torch.set_num_threads(1)
print("up", flush=True)
sys.stdin.readline()
for _ in range(3):
    cache = WeightCache(Path(sys.argv[2]), 2**30, smallest=0)
    loaded = load_model(resolve_model(sys.argv[1]), dtype=torch.bfloat16, cache=cache)
    run = ModelRun(loaded, dtype=torch.bfloat16)
    print(float(run.step([(run.row([3, 1, 4, 1, 5], 5), 5)]).double().sum()).hex(), flush=True)
"""


def test_workers_that_start_together_compute_the_same_and_leave_one_file(model: Path, kept: Path) -> None:
    command = [sys.executable, "-c", START, str(model), str(kept)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    starts = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    for each in starts:
        assert each.stdout is not None
        assert each.stdout.readline() == "up\n"
    for each in starts:
        assert each.stdin is not None
        each.stdin.write("go\n")
        each.stdin.flush()
    said = [each.communicate(timeout=120)[0].split() for each in starts]
    assert [each.returncode for each in starts] == [0, 0]
    expected = float(_logits(_load(model, None)).double().sum()).hex()
    assert said == [[expected] * 3] * 2
    assert sorted(file.suffix for file in kept.iterdir()) == ["", ".safetensors"], "not just the lock and one file"


def _options(model: Path, **others: object) -> Options:
    return Options(model=str(model), max_num_seqs=2, num_blocks_override=8, **others)  # type: ignore[arg-type]


def test_workers_use_it_by_default_for_large_models_and_not_with_0(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache_module, "_SMALLEST", 0)
    weights = tmp_path / "cache" / "weights"
    build_runner(_options(model, weight_cache=0))
    assert not weights.exists()
    build_runner(_options(model, load_format="dummy"))
    assert not _files(weights), "random weights are kept"
    build_runner(_options(model))
    assert len(_files(weights)) == 1
    assert stat.S_IMODE(weights.stat().st_mode) == 0o700


def test_digests_of_large_files_are_remembered_until_they_change(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest, "REMEMBERED_FROM", 4)
    file = tmp_path / "weights.gguf"
    file.write_bytes(b"before")
    expected = digest.files_digest([file])
    assert digest.files_digest([file], kept) == expected
    (note,) = kept.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(digest, "_sha256", lambda file: pytest.fail("the file was read again"))
        assert digest.files_digest([file], kept) == expected
    note.write_text("not a digest")
    assert digest.files_digest([file], kept) == expected
    status = file.stat()
    file.write_bytes(b"behind")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert digest.files_digest([file], kept) == digest.files_digest([file]) != expected


def test_small_models_are_not_kept(model: Path, kept: Path) -> None:
    load_model(resolve_model(str(model)), dtype=torch.bfloat16, cache=WeightCache(kept, 2**30))
    assert not _files(kept)


def test_a_directory_that_cannot_be_used_is_a_warning(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "file"))
    assert build_runner(_options(model)) is not None
    assert "packed weights cannot be kept" in caplog.text
    assert "OCTAVO_CACHE_DIR" in caplog.text
