"""Damaged or malicious model files cause errors that name the file: no crash, no hang, no other error.

Files come from the operator, not over the network; but many were made by strangers.
"""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.fuzz.mutation import change_bytes
from protos import inference_pb2 as pb
from router.text.chat_template import TemplateError
from router.text.tokenizer import Tokenizer
from runtime.model_files import resolve_model
from runtime.tokenizer.files import TokenizerError
from tests.support.models.gguf_files import write_gguf
from tests.support.models.tiny_model import make_tiny_model
from worker.models.loader import load_model
from worker.weights.reader import WeightsError

# Values that no config should have; each replaces every value of the config in turn.
_HOSTILE = (
    None,
    True,
    -1,
    0,
    1,
    7,
    2**40,
    -(2**70),
    0.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    [],
    [1],
    {},
    {"a": 1},
)
_ROUNDS = 150


def _head_bytes(data: bytes) -> int:
    """Offset at which the numbers of a safetensors file begin."""
    return 8 + int.from_bytes(data[:8], "little")


def _outcome(read: Callable[[], None], documented: type[Exception], path: Path) -> str:
    """Returns "taken", or "refused" if a documented error names the file. Other errors are raised."""
    try:
        read()
    except documented as error:
        return "refused" if str(path) in str(error) else f"{error!r} names no file"
    return "taken"


def _load(path: Path) -> None:
    # Damaged scales may be NaN, which is not the reader's fault.
    with np.errstate(all="ignore"):
        load_model(resolve_model(str(path)), dtype=torch.float32)


def _damage(
    path: Path, num_bytes: Callable[[bytes], int], read: Callable[[], None], documented: type[Exception]
) -> None:
    """Reads a file _ROUNDS times, each time with other changes to its first bytes."""
    whole, outcomes = path.read_bytes(), list[str]()
    head = num_bytes(whole)
    for round_ in range(_ROUNDS):
        path.write_bytes(change_bytes(whole[:head], Random(f"{path.name}/{round_}")) + whole[head:])
        outcomes.append(_outcome(read, documented, path.parent))
    path.write_bytes(whole)
    read()
    assert set(outcomes) <= {"refused", "taken"}
    assert outcomes.count("refused") > _ROUNDS // 3


@pytest.fixture(scope="module", name="model")
def _model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def test_gguf(model: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", model, Kind.Q8_0)
    _damage(path, lambda data: len(data) // 4, lambda: _load(path), WeightsError)


def test_safetensors(model: Path) -> None:
    _damage(model / "model.safetensors", _head_bytes, lambda: _load(model), WeightsError)


def test_bytes_of_a_config(model: Path) -> None:
    _damage(model / "config.json", len, lambda: _load(model), WeightsError)


def test_values_of_a_config(model: Path) -> None:
    path, outcomes = model / "config.json", list[str]()
    whole = path.read_text()
    config = json.loads(whole)
    for key in config:
        for value in _HOSTILE:
            path.write_text(json.dumps(config | {key: value}))
            outcomes.append(_outcome(lambda: _load(model), WeightsError, model))
    path.write_text(whole)
    assert set(outcomes) == {"refused", "taken"}


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_tokenizers(tmp_path: Path, name: str) -> None:
    directory = make_tiny_model(tmp_path / "tokenizer")

    def read() -> None:
        tokenizer = Tokenizer(directory)
        tokenizer.encode("w1 w2")
        tokenizer.decode([1, 2], skip_special_tokens=True)
        # A chat template that is missing or fails is an error of each chat request, not of the tokenizer.
        with contextlib.suppress(TemplateError):
            tokenizer.render(pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="w1 w2")]))

    _damage(directory / name, len, read, TokenizerError)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", b"3"),
        ("tokenizer_config.json", b"[" * 100_000),
        ("tokenizer_config.json", b'{"chat_template": [{"name": []}]}'),
        ("tokenizer_config.json", b'{"chat_template": ["x"]}'),
        ("special_tokens_map.json", b'"x"'),
        ("chat_template.jinja", b"\xff"),
        ("chat_template.jinja", b"{% for"),
    ],
)
def test_a_tokenizers_other_files(tmp_path: Path, name: str, content: bytes) -> None:
    directory = make_tiny_model(tmp_path)
    (directory / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=str(directory)):
        Tokenizer(directory)
