"""Measures how much memory loading a model takes beyond the weights that stay.

    python -m benchmarks.engine.load_memory [--hidden-size 1024] [--num-layers 8] [--json]

Writes a model of random weights as safetensors in bfloat16 and as GGUF in Q8_0, and loads it, each time in a process of
its own, in several quantizations, whole and as rank 0 of 2, with and without a cache of packed weights. Another process
reads how much anonymous memory the loading one has: pages of mapped files, which the system takes back when it needs
them, do not count. Shows the peak above the memory before loading; the memory that stays (packed weights, embeddings);
and the peak above what stays, in units of the model's largest tensor as it is read: in bfloat16 from safetensors, in
float32 from GGUF.
"""

import argparse
import gc
import json
import os
import select
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file

from kernels.cpu_backend import cpu_backend
from kernels.shard import Shard
from runtime.model_files import resolve_model
from tests.support.models.gguf_files import write_gguf
from worker.models.config import config_from_directory
from worker.models.loader import LoadedModel, load_model
from worker.models.registry import model_class
from worker.weights.cache import WeightCache
from worker.weights.quantization.kinds import QuantizationOption

_PAGE = os.sysconf("SC_PAGE_SIZE")
_PAUSE_S = 0.0002
_LONGEST_S = 300.0
# A model loaded before the measurement, so that the threads and buffers of any load exist already.
_WARM_UP: dict[str, int] = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 64, "num_hidden_layers": 1}

Format = Literal["safetensors", "gguf"]
# empty: loading fills it; full: loading reads the weights from it.
Cache = Literal["none", "empty", "full"]


@dataclass(frozen=True)
class Case:
    format: Format
    quantization: QuantizationOption
    num_ranks: int = 1
    cache: Cache = "none"


@dataclass(frozen=True)
class Measured:
    """Memory of one load, in bytes. peak, stays: above the memory before loading, at most and once loaded. weights: as
    the model itself reports. largest: the largest tensor, as it is read."""

    peak: int
    stays: int
    weights: int
    largest: int

    @property
    def excess(self) -> float:
        """The peak above what has to stay, in largest tensors. What has to stay is the smaller of `stays` (weights used
        in place in a mapped file are in neither it nor the peak) and `weights` (memory that leaks must not excuse a
        peak)."""
        return (self.peak - min(self.stays, self.weights)) / self.largest


CASES = (
    *(Case(file, how, ranks) for file in get_args(Format) for how in ("none", "int8", "int4") for ranks in (1, 2)),
    *(Case(file, "none", 2, cache) for file in get_args(Format) for cache in ("empty", "full")),
)


def write_model(directory: Path, sizes: Mapping[str, int]) -> None:
    """Writes directory/safetensors and directory/gguf.gguf. sizes: fields of config.json."""
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_attention_heads": sizes["hidden_size"] // 64,
        "num_key_value_heads": sizes["hidden_size"] // 64,
        "head_dim": 64,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
    }
    config |= sizes
    folder = directory / "safetensors"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    shapes = model_class("LlamaForCausalLM").tensor_shapes(config_from_directory(folder))
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    write_gguf(directory / "gguf.gguf", folder, Kind.Q8_0, arch="llama")


def measure(directory: Path, cases: Sequence[Case]) -> Iterator[Measured]:
    """Loads, for each case, the model that `write_model` wrote, and yields its memory. Forks: call it before torch
    computes anything in this process."""
    for case in cases:
        with tempfile.TemporaryDirectory() as kept:
            if case.cache == "full":
                _watched(lambda ready, case=case, kept=kept: _load(directory, case, Path(kept), ready))
            yield _watched(lambda ready, case=case, kept=kept: _load(directory, case, Path(kept), ready))


def _load(directory: Path, case: Case, kept: Path, say: Callable[[object], None]) -> None:
    """Runs in the loading process. Says that it is about to load; then the bytes of weights and of the largest tensor,
    and waits to be killed."""

    def load(model: Path) -> LoadedModel:
        return load_model(
            resolve_model(str(model)),
            dtype=torch.bfloat16,
            quantization=case.quantization,
            make_backend=lambda config: replace(
                cpu_backend(torch.bfloat16, config.head_size), shard=Shard(0, case.num_ranks)
            ),
            cache=None if case.cache == "none" else WeightCache(kept, 2**34, smallest=2**23),
        )

    name = "safetensors" if case.format == "safetensors" else "gguf.gguf"
    load(directory / "small" / name)
    gc.collect()
    say("ready")
    loaded = load(directory / "large" / name)
    gc.collect()
    shapes = model_class(loaded.config.architecture).tensor_shapes(loaded.config).values()
    read_in = torch.bfloat16 if case.format == "safetensors" else torch.float32
    say([loaded.model.weight_bytes, max(map(prod, shapes)) * read_in.itemsize])
    signal.pause()


def _watched(load: Callable[[Callable[[object], None]], None]) -> Measured:
    """Measures a forked process that calls `load`."""
    reader, writer = os.pipe()
    pid = _fork(lambda: load(lambda word: _say(writer, word)))
    os.close(writer)
    try:
        with open(reader, "rb", buffering=0) as results, open(f"/proc/{pid}/statm", "rb", buffering=0) as statm:
            _line(results)
            before = peak = _anonymous(statm)
            until = time.monotonic() + _LONGEST_S
            while not select.select([results], [], [], _PAUSE_S)[0]:
                peak = max(peak, _anonymous(statm))
                if time.monotonic() > until:
                    raise TimeoutError(f"the model did not load within {_LONGEST_S:.0f} s")
            weights, largest = _line(results)
            stays = _anonymous(statm)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return Measured(peak - before, stays - before, weights, largest)


def _fork(task: Callable[[], object]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        task()
        os._exit(0)
    finally:
        # Skips the parent's cleanup handlers.
        traceback.print_exc()
        os._exit(1)


def _say(writer: int, word: object) -> None:
    os.write(writer, json.dumps(word).encode() + b"\n")


def _line(results: BinaryIO) -> Any:
    line = results.readline()
    if not line:
        raise RuntimeError("the loading process ended; see its stderr")
    return json.loads(line)


def _anonymous(statm: BinaryIO) -> int:
    """Bytes of a process that no file backs: resident minus shared pages (proc(5))."""
    statm.seek(0)
    _, resident, shared = map(int, statm.read().split()[:3])
    return (resident - shared) * _PAGE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--intermediate-size", type=int, default=4096)
    parser.add_argument("--vocab-size", type=int, default=32_768)
    parser.add_argument("--num-layers", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="an object a line, in place of a table")
    parser.add_argument("--cases", type=int, nargs="*", help="numbers of the cases to run, from 0")
    given = parser.parse_args()
    large: dict[str, int] = {
        "hidden_size": given.hidden_size,
        "intermediate_size": given.intermediate_size,
        "vocab_size": given.vocab_size,
        "num_hidden_layers": given.num_layers,
    }
    cases = [CASES[number] for number in given.cases] if given.cases else CASES
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        # In a process of its own: otherwise loading could reuse the memory that this frees.
        _run(lambda: [write_model(path / name, each) for name, each in (("small", _WARM_UP), ("large", large))])
        if not given.json:
            print("format       quantization ranks cache     weights     stays      peak  above what stays")
            print("                                            MiB       MiB       MiB  in tensors")
        for case, found in zip(cases, measure(path, cases), strict=True):
            if given.json:
                print(json.dumps(asdict(case) | asdict(found)), flush=True)
                continue
            sizes = "".join(f"{size / 2**20:>10.1f}" for size in (found.weights, found.stays, found.peak))
            name = f"{case.format:<12} {case.quantization:<12} {case.num_ranks:>5} {case.cache:<6}"
            print(f"{name}{sizes}{found.excess:>13.2f}", flush=True)


def _run(task: Callable[[], object]) -> None:
    if os.waitpid(_fork(task), 0)[1]:
        raise RuntimeError("the model could not be written; see stderr")


if __name__ == "__main__":
    main()
