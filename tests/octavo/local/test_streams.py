"""AsyncLLM on a GPU builds its engine on one thread and computes on another: both work on the device's stream."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from octavo import AsyncLLM, SamplingParams
from tests.fakes.routers import smollm2_tokenizer
from tests.support.gpu.gpu import DEVICE
from tests.support.gpu.stream_checker import UnorderedError, checked_streams
from worker.device.device import InterpretedDevice
from worker.process import build

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="watches what the interpreter does")

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": 2,
}


async def _generated(folder: Path, device: InterpretedDevice, monkeypatch: pytest.MonkeyPatch) -> int:
    """Returns the number of tokens."""
    (folder / "config.json").write_text(json.dumps(_LLAMA))
    monkeypatch.setattr(build, "select_device", lambda options, replica, rank: device)
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    async with AsyncLLM(
        str(folder),
        tokenizer=str(smollm2_tokenizer().directory),
        device="cuda",
        load_format="dummy",
        enforce_eager=True,
        num_blocks_override=32,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_model_len=64,
    ) as llm:
        [*_, found] = [output async for output in llm.generate([5, 6, 7], sampling)]
    return len(found.choices[0].token_ids)


async def test_the_engines_thread_works_on_the_stream_of_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with checked_streams() as checker:
        assert await _generated(tmp_path, checker.device(), monkeypatch) == 4
    assert not checker.num_accesses["the default stream"]
    assert checker.num_accesses["stream 1"] > 1000


async def test_a_thread_left_on_the_default_stream_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with checked_streams() as checker:
        device = checker.device()
        device.current = nullcontext  # type: ignore[method-assign]
        with pytest.raises(UnorderedError, match=r"the default stream .* what stream 1"):
            await _generated(tmp_path, device, monkeypatch)
