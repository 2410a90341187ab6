import json
import subprocess
import sys

import pytest

from kernels.cpu_backend import native_kernels


@pytest.mark.skipif(native_kernels() is None, reason="an e4m3 cache needs the C++ kernels")
def test_the_cache_has_the_dtype_that_was_asked_for() -> None:
    command = [sys.executable, "-m", "benchmarks.engine.decode_step", "--kv-cache-dtype", "fp8", "--json"]
    result = subprocess.run(
        [*command, "--batch", "1", "--context", "16", "--threads", "1", "--seconds", "0"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert json.loads(result.stdout)["kernel_path"].endswith("kv-float8_e4m3fn")
