"""The engine and all below it run where torch, triton and numpy are all there is: benchmarks on a GPU need no more."""

import subprocess
import sys

from tests.support.repository import ROOT

MISSING = ("protos", "pydantic", "zmq", "msgspec", "gguf", "google", "grpc", "transformers", "safetensors")


MODULES = (
    *("gpu.engine", "gpu.device_rows", "gpu.sampler", "gpu.pending"),
    *("device.staging", "device.device", "sampling.features", "sampling.filters", "step.batch", "step.inputs"),
)


def test_imports_without_what_a_machine_with_a_gpu_may_lack() -> None:
    imports = ", ".join(f"worker.{module}" for module in MODULES)
    # None in sys.modules is a module that cannot be imported.
    code = f"import sys; sys.modules.update(dict.fromkeys({MISSING})); import {imports}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
