"""transformers works beside this repository, although it probes for a package called `kernels` and finds ours.

A version or a foreign name in kernels/__init__.py makes importing any transformers model fail.
"""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.repository import ROOT

PROGRAM = """
import importlib.util
print(importlib.util.find_spec("kernels").origin)
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    vocab_size=32,
)
print(sum(p.numel() for p in LlamaForCausalLM(config).parameters()))
"""


def test_a_transformers_model_imports_with_our_kernels_package_installed(tmp_path: Path):
    # PYTHONPATH stands for an editable install, which is a .pth file with the same path.
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    origin, num_parameters = done.stdout.split()[-2:]
    assert Path(origin) == ROOT / "kernels" / "__init__.py"
    assert int(num_parameters) > 0
