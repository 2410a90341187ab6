"""Serves SmolLM2's real weights from checkpoints in each quantized layout: perplexity and decode speed beside bf16.

    python -m benchmarks.engine.quantized_layouts [--only awq-64,nf4,Q2_K] [--measure perplexity,speed] [--tokens 8192]
                                                  [--oracle] [--json]

Each layout is written to a temporary directory as its library writes it (tests/support/checkpoints; rounded to nearest,
so perplexities say what the layout costs at most), or by llama.cpp's llama-quantize if benchmarks/peers has installed
that, and is loaded with quantization=auto. For each:
- equal: weights whose floats, as Octavo reads them, are the library's formula bit by bit, of all quantized ones;
- with --oracle, exact: the same against the library itself: AutoAWQ, GPTQModel, compressed-tensors or bitsandbytes,
  installed in an environment of their own in the user's cache, or llama.cpp (llama-quantize to F32);
- stored: the kinds of a GGUF file's matrices, as shares of their weights;
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
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.engine.perplexity import Scores, greedy, quality_engine, score, text_tokens, windows
from benchmarks.engine.quantized_layouts.oracle import library_floats
from benchmarks.peers.directory import peer_directory
from benchmarks.peers.prepare_models import HUGGING_FACE, MODEL, model_path, prepare
from octavo.bench.workload import random_prompts
from runtime.model_files import resolve_model
from tests.support.checkpoints.integers import Tensors
from tests.support.checkpoints.layouts import LAYOUTS, layout_tensors, write_checkpoint
from worker.models.config import config_from_directory, read_json
from worker.models.families.llama import LlamaModel
from worker.models.gguf_source import GGUFSource
from worker.weights.quantization.methods import stored_quantization
from worker.weights.safetensors_files import SafetensorsFiles
from worker.weights.safetensors_source import SafetensorsSource

# Their libraries need whole groups.
_LEFT_OUT = ("awq-128", "w4a16-128", "w8a16-128-asymmetric")
# compressed-tensors 0.20 no longer reads groups in the order of activations; 0.17.0 gives the same floats as we do.
_NO_ORACLE = ("w4a16-64-act-order",)
# By llama-quantize; tensors whose rows are no multiple of 256 get another kind of about as many bits.
GGUF_KINDS = ("Q2_K", "Q3_K_S", "Q4_0", "Q4_K_S", "Q5_0", "Q5_1", "Q5_K_S", "Q6_K", "Q8_0", "IQ4_NL", "IQ4_XS")
# Kinds whose integers kernels take, and the option that keeps them.
_KEPT = {"Q4_0": "int4", "Q5_0": "int8", "Q8_0": "int8", "IQ4_NL": "int8"}
_MEASURES = ("perplexity", "speed")
_WINDOW = 2048
_PROMPT, _OUTPUT = 32, 64
_ROUNDS = 3
_VOCAB_SIZE = 49152


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    kept: str
    scores: Scores | None = None
    # Output tokens/s by the number of requests.
    decode: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """prompts: to score, none if perplexity is not asked for."""

    prompts: list[list[int]]
    measures: set[str]

    def measure(self, model: str, quantization: str = "auto") -> Measured:
        """Loads a model in bfloat16 and measures it."""
        engine = quality_engine(model=model, dtype="bfloat16", quantization=quantization, weight_cache=0)
        group = len(self.prompts)
        scores = score(engine, self.prompts) if "perplexity" in self.measures else None
        decode: dict[int, float] = {}
        for batch in (1, 8) if "speed" in self.measures else ():
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


def equal_to_ggml(path: Path, program: Path) -> str:
    """Returns how many matrices of a GGUF file are ggml's floats bit by bit."""
    converted = path.with_suffix(".f32.gguf")
    subprocess.run([program, "--allow-requantize", path, converted, "F32", "2"], check=True, capture_output=True)
    source, theirs = GGUFSource(path), GGUFSource(converted)
    names = [name for name, shape in source.shapes.items() if len(shape) == 2]
    equal = [torch.equal(source.tensor(name), theirs.tensor(name)) for name in names]
    converted.unlink()
    return f"{sum(equal)}/{len(equal)}"


def stored_kinds(path: Path) -> str:
    """Returns the kinds of a GGUF file's matrices, as shares of their weights."""
    source = GGUFSource(path)
    numbers = Counter[str]()
    for name, shape in source.shapes.items():
        if len(shape) == 2:
            numbers[source.kind_of(name).name] += shape[0] * shape[1]
    return " ".join(f"{kind}:{number / numbers.total():.0%}" for kind, number in numbers.most_common())


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
        if oracle and name not in _NO_ORACLE:
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
        found = {"exact": equal_to_ggml(target, program)} if oracle else {}
        yield kind, target, found | {"stored": stored_kinds(target)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="comma-separated layouts; empty: all")
    parser.add_argument("--measure", default=",".join(_MEASURES), help="comma-separated; empty: only load")
    parser.add_argument("--tokens", type=int, default=4 * _WINDOW, help="tokens of the text, at most")
    parser.add_argument("--oracle", action="store_true", help="compare with the libraries themselves, too")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    wanted, measures = ({name for name in each.split(",") if name} for each in (arguments.only, arguments.measure))
    if unknown := wanted - {*LAYOUTS, *GGUF_KINDS}:
        parser.error(f"--only {', '.join(sorted(unknown))}: the layouts are {', '.join((*LAYOUTS, *GGUF_KINDS))}")
    if unknown := measures - {*_MEASURES}:
        parser.error(f"--measure {', '.join(sorted(unknown))}: {' and '.join(_MEASURES)} can be measured")
    prepare()
    if arguments.tokens < _WINDOW:
        parser.error(f"--tokens {arguments.tokens}: must be at least {_WINDOW}, the length of a prompt")
    bench = Bench(prompts=windows(text_tokens(MODEL), _WINDOW, arguments.tokens), measures=measures)
    base = bench.measure(str(model_path(HUGGING_FACE)), "none")

    def show(name: str, measured: Measured, found: dict[str, str]) -> None:
        figures: dict[str, object] = {**found, "kept": measured.kept}
        if measured.scores is not None and base.scores is not None:
            ratio, error = measured.scores.ratio_to(base.scores)
            figures |= {"perplexity": round(measured.scores.perplexity, 3), "ratio": round(ratio, 4)}
            figures["ratio_error"] = round(error, 4)
        for batch, rate in measured.decode.items():
            figures[f"decode_{batch}"] = round(rate, 1)
            figures[f"decode_{batch}_ratio"] = round(rate / base.decode[batch], 2)
        if arguments.json:
            print(json.dumps({"layout": name, **figures}), flush=True)
        else:
            print(f"{name:<22}", "  ".join(f"{key} {value}" for key, value in figures.items()), flush=True)

    show("bfloat16", base, {})
    with tempfile.TemporaryDirectory() as directory:
        for name, path, found in checkpoints(Path(directory), wanted, oracle=arguments.oracle):
            show(name, bench.measure(str(path)), found)
            if name in _KEPT:
                show(f"{name} {_KEPT[name]}", bench.measure(str(path), _KEPT[name]), {})
    if "speed" in measures:
        show("bfloat16 again", bench.measure(str(model_path(HUGGING_FACE)), "none"), {})


if __name__ == "__main__":
    main()
