"""`octavo up` on the GPU with random weights: seconds until it serves, and until it serves again after kill -9.

The model is a Llama of 1B made here (its config, a tokenizer of bytes, `load_format: dummy`), so that no weights need
to travel. The worker is killed while 8 streams decode; they must end with all their tokens. The second start of a
worker has a warm cache of kernels. Toy mode serves a tiny one on the CPU. Needs all that Octavo needs.
"""

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.report import Report

OP = "recover"
_LLAMA_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
_TOY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_NUM_STREAMS, _NUM_TOKENS = 8, 256


def run(report: Report, *, toy: bool) -> None:
    # Ends `octavo up`, too, when this process is told to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory, "model")
        write_model(model, _TOY if toy else _LLAMA_1B)
        _serve(report, Path(directory), model, toy)


def write_model(folder: Path, sizes: dict[str, Any]) -> None:
    """Writes a Llama's config, and a tokenizer whose tokens are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={each: index for index, each in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(alphabet) + 1,
        "eos_token_id": len(alphabet),
        "bos_token_id": len(alphabet),
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **sizes,
    }
    (folder / "config.json").write_text(json.dumps(config))


def _serve(report: Report, directory: Path, model: Path, toy: bool) -> None:
    from octavo import SamplingParams
    from tests.support.streams import say
    from tests.support.up import Up

    device = ("--device=cpu", "--dtype=float32", "--kv-cache-memory=0.05") if toy else ("--device=cuda",)
    flags = ("--load-format=dummy", "--max-model-len=2048", "--max-restarts=3", *device)
    prompts = [f"Stream number {number} begins here." for number in range(_NUM_STREAMS)]
    num_tokens = 32 if toy else _NUM_TOKENS
    sampling = [
        SamplingParams(temperature=0.8 * (number % 2), seed=number, max_tokens=num_tokens, ignore_eos=True)
        for number in range(_NUM_STREAMS)
    ]
    begin = time.perf_counter()
    # Up would give its processes the repository alone.
    path = os.environ.get("PYTHONPATH", "")
    with Up(directory, f"--model={model}", *flags, real=True, PYTHONPATH=path) as up:
        up.wait_for("ready for epoch")
        _row(report, "first start, until the worker is ready", begin)
        up.wait_for("serving; Ctrl-C to stop")
        expected = say(up.port, prompts, sampling, lambda: None)
        begin = time.perf_counter()
        again = say(up.port, prompts, sampling, lambda: None)
        _row(report, f"{_NUM_STREAMS} streams of {num_tokens} tokens", begin)
        assert again == expected, "the same seeds give the same tokens"
        killed: list[float] = []

        def kill() -> None:
            killed.append(time.perf_counter())
            up.child("worker").kill()

        tokens = say(up.port, prompts, sampling, kill)
        _row(report, "kill -9 of the worker, until its streams have ended", killed[0])
        up.wait_for("ready for epoch", count=2)
        assert [len(each) for each in tokens] == [num_tokens] * _NUM_STREAMS
        # Resumed rows are computed in other batches, so in bfloat16 their tokens may differ.
        num_equal = sum(one == other for one, other in zip(tokens, expected, strict=True))
        report.note(OP, "streams with the tokens of the undisturbed run", f"{num_equal} of {_NUM_STREAMS}")
        for line in up.lines:
            if "ready for epoch" in line or " has ended" in line:
                report.note(OP, "log", line)


def _row(report: Report, case: str, begin: float) -> None:
    report.row(OP, case, "host", (time.perf_counter() - begin) * 1e3)
