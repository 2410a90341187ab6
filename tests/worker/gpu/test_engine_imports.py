"""The engine and everything below it need only torch, triton and numpy, so that GPU benchmarks need no more."""

import subprocess
import sys

from tests.support.repository import ROOT

MISSING = ("protos", "pydantic", "zmq", "msgspec", "gguf", "google", "grpc", "transformers", "safetensors")


MODULES = (
    *("gpu.engine", "gpu.sampler", "gpu.pending"),
    *("device.staging", "device.device", "sampling.features", "sampling.filters", "step.batch", "step.inputs"),
)


def test_imports_without_what_a_machine_with_a_gpu_may_lack() -> None:
    imports = ", ".join(f"worker.{module}" for module in MODULES)
    # A module that is None in sys.modules cannot be imported.
    code = f"import sys; sys.modules.update(dict.fromkeys({MISSING})); import {imports}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
