"""Loading takes the memory of the kept weights and of one tensor: not of a checkpoint, nor copies in other dtypes."""

import json
import subprocess
import sys

from benchmarks.engine.load_memory import CASES, Case, Measured
from tests.support.kernels.kernel_paths import native
from tests.support.repository import ROOT

# These cases show copies of whole tensors in float32, whole tensors kept alive by a part, layers concatenated before
# they are packed, and embeddings held by the cache of packed weights.
WATCHED = (
    Case("safetensors", "int8", 1),
    Case("gguf", "none", 1),
    Case("gguf", "int8", 2),
    Case("gguf", "none", 2, "empty"),
)


def test_the_peak_stays_below_what_is_kept_and_the_largest_tensor():
    native()
    command = [sys.executable, "-m", "benchmarks.engine.load_memory", "--json", "--cases"]
    command += [str(CASES.index(case)) for case in WATCHED]
    sizes = ["--hidden-size", "512", "--intermediate-size", "2048", "--vocab-size", "24576", "--num-layers", "2"]
    said = subprocess.run([*command, *sizes], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert said.returncode == 0, said.stderr
    lines = [json.loads(line) for line in said.stdout.splitlines()]
    assert len(lines) == len(WATCHED)
    for case, line in zip(WATCHED, lines, strict=True):
        found = Measured(**{name: line[name] for name in ("peak", "stays", "weights", "largest")})
        assert found.excess <= 1, (case, found)
