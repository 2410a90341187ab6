"""Serves SmolLM2's real weights from checkpoints in each quantized layout: perplexity and decode speed beside bf16.

    python -m benchmarks.engine.quantized_layouts [--only awq-64,nf4,Q2_K] [--tokens 8192] [--oracle] [--json]

Each layout is written to a temporary directory as its library writes it (tests/support/checkpoints; rounded to nearest,
so perplexities say what the layout costs at most), or by llama.cpp's llama-quantize if benchmarks/peers has installed
that, and is loaded with quantization=auto. For each:
- equal: weights whose floats, as Octavo reads them, are the library's formula bit by bit, of all quantized ones;
- with --oracle, exact: the same against the library itself (compressed-tensors, bitsandbytes), which is installed in an
  environment of its own in the user's cache;
- kept: the quantization that auto stands for, none if weights are dequantized;
- perplexity of the text of benchmarks/engine/perplexity.py, and its ratio to bfloat16's;
- decode_1, decode_8: output tokens/s of 1 and 8 greedy requests (32 tokens in, 64 out), and their ratio to bfloat16's,
  which is measured before and after all layouts.
Groups of 128 are left out for layouts whose libraries need whole groups: SmolLM2 has 576 inputs. Takes about 30 s a
layout on two cores.
"""

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.engine.layout_oracle import LIBRARIES, library_floats
from benchmarks.engine.perplexity import Scores, greedy, quality_engine, score, text_tokens, windows
from benchmarks.peers.directory import peer_directory
from benchmarks.peers.prepare_models import HUGGING_FACE, MODEL, model_path, prepare
from octavo.bench.workload import random_prompts
from runtime.model_files import resolve_model
from tests.support.checkpoints.integers import Tensors
from tests.support.checkpoints.layouts import LAYOUTS, layout_tensors, write_checkpoint
from worker.models.config import config_from_directory, read_json
from worker.models.families.llama.model import LlamaModel
from worker.weights.quantization.methods import stored_quantization
from worker.weights.safetensors_files import SafetensorsFiles
from worker.weights.safetensors_source import SafetensorsSource

# Their libraries need whole groups.
_LEFT_OUT = ("awq-128", "w4a16-128", "w8a16-128-asymmetric")
# By llama-quantize; tensors whose rows are no multiple of 256 get another kind of about as many bits.
GGUF_KINDS = ("Q2_K", "Q3_K_S", "Q4_0", "Q4_K_S", "Q5_0", "Q5_1", "Q5_K_S", "Q6_K", "Q8_0", "IQ4_NL", "IQ4_XS")
_WINDOW = 2048
_PROMPT, _OUTPUT = 32, 64
_ROUNDS = 3
_VOCAB_SIZE = 49152


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    scores: Scores
    kept: str
    decode: dict[int, float]


def measure(model: str, prompts: list[list[int]], *, quantization: str = "auto") -> Measured:
    """Loads a model in bfloat16 and measures it."""
    engine = quality_engine(model=model, dtype="bfloat16", quantization=quantization, weight_cache=0)
    scores, group = score(engine, prompts), len(prompts)
    decode: dict[int, float] = {}
    for batch in (1, 8):
        rates: list[float] = []
        for round_ in range(_ROUNDS):
            requests = random_prompts(batch, _PROMPT, _VOCAB_SIZE, round_)
            # The prompts alone first: the next pass finds their blocks, and is all decoding.
            greedy(engine, requests, 1, group)
            begun = time.perf_counter()
            greedy(engine, requests, _OUTPUT, group + batch)
            rates.append(batch * _OUTPUT / (time.perf_counter() - begun))
            group += 2 * batch
        decode[batch] = sorted(rates)[len(rates) // 2]
    return Measured(scores=scores, kept=engine.model.quantization, decode=decode)


def equal_weights(path: Path, floats: Tensors) -> str:
    """Returns how many of the quantized weights are these floats bit by bit, once rounded to their dtype."""
    shapes = LlamaModel.tensor_shapes(config_from_directory(path))
    source = SafetensorsSource(SafetensorsFiles(path), stored_quantization(read_json(path / "config.json")), shapes)
    names = [name for name in floats if "_proj" in name]
    equal = [torch.equal(source.tensor(name).to(floats[name].dtype), floats[name]) for name in names]
    return f"{sum(equal)}/{len(equal)}"


def checkpoints(directory: Path, wanted: set[str], *, oracle: bool) -> Iterator[tuple[str, Path, dict[str, str]]]:
    """Yields name, path and comparisons of each wanted layout; its files may be deleted then."""
    base = model_path(HUGGING_FACE)
    for name, layout in LAYOUTS.items():
        if (wanted and name not in wanted) or (not wanted and name in _LEFT_OUT):
            continue
        stored, floats = layout_tensors(base, layout)
        path = write_checkpoint(directory / name, base, stored, layout.config)
        for file in base.glob("*token*"):
            (path / file.name).write_bytes(file.read_bytes())
        found = {"equal": equal_weights(path, floats)}
        if oracle and layout.config["quant_method"] in LIBRARIES:
            found["exact"] = equal_weights(path, library_floats(path, directory / "oracle.safetensors"))
        yield name, path, found
    program = peer_directory("llama_cpp") / "bin" / "llama-quantize"
    for kind in GGUF_KINDS:
        if wanted and kind not in wanted:
            continue
        if not program.exists():
            print(f"{kind}: left out, benchmarks/peers/install_llama_cpp.sh installs llama-quantize", flush=True)
            continue
        target = directory / f"{kind}.gguf"
        source = resolve_model(MODEL).path
        command = [program, "--allow-requantize", "--pure", source, target, kind, "2"]
        subprocess.run(command, check=True, capture_output=True)
        yield kind, target, {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="comma-separated layouts; empty: all")
    parser.add_argument("--tokens", type=int, default=4 * _WINDOW, help="tokens of the text, at most")
    parser.add_argument("--oracle", action="store_true", help="compare with the libraries themselves, too")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    prepare()
    prompts = windows(text_tokens(MODEL), _WINDOW, arguments.tokens)
    base = measure(str(model_path(HUGGING_FACE)), prompts, quantization="none")

    def show(name: str, measured: Measured, found: dict[str, str]) -> None:
        ratio, error = measured.scores.ratio_to(base.scores)
        figures: dict[str, object] = {
            **found, "kept": measured.kept, "perplexity": round(measured.scores.perplexity, 3),
            "ratio": round(ratio, 4), "ratio_error": round(error, 4),
        }  # fmt: skip
        for batch, rate in measured.decode.items():
            figures[f"decode_{batch}"] = round(rate, 1)
            figures[f"decode_{batch}_ratio"] = round(rate / base.decode[batch], 2)
        if arguments.json:
            print(json.dumps({"layout": name, **figures}), flush=True)
        else:
            print(f"{name:<22}", "  ".join(f"{key} {value}" for key, value in figures.items()), flush=True)

    show("bfloat16", base, {})
    wanted = {name for name in arguments.only.split(",") if name}
    if unknown := wanted - {*LAYOUTS, *GGUF_KINDS}:
        parser.error(f"--only {', '.join(sorted(unknown))}: the layouts are {', '.join((*LAYOUTS, *GGUF_KINDS))}")
    with tempfile.TemporaryDirectory() as directory:
        for name, path, found in checkpoints(Path(directory), wanted, oracle=arguments.oracle):
            show(name, measure(str(path), prompts), found)
            if name in ("Q5_0", "IQ4_NL", "Q4_0", "Q8_0"):
                kept = "int4" if name == "Q4_0" else "int8"
                show(f"{name} {kept}", measure(str(path), prompts, quantization=kept), found)
    show("bfloat16 again", measure(str(model_path(HUGGING_FACE)), prompts, quantization="none"), {})


if __name__ == "__main__":
    main()
