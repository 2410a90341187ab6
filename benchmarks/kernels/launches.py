"""Times what Python does to launch kernels, without a GPU: a driver of Triton takes the launches and drops them.

    python -m benchmarks.kernels.launches [--triton]

prints microseconds of one launch by Octavo's code and by Triton's own, and of an eager decode step of small Llama
models, per launch: of the whole step, and of a layer alone (from two numbers of layers). --triton: the step launches by
Triton's own code. Nothing is compiled; torch computes its own operations on one core, with tiny tensors.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

# Before Triton is imported.
os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("OMP_NUM_THREADS", "1")

from triton.runtime.jit import JITFunction

from configs.options import Options
from kernels.triton_common.jit import Kernel
from protos import inference_pb2, step_pb2
from tests.support.gpu.null_driver import NullKernel, copy_kernel, install, launch_arguments
from tests.support.scheduler.steps import decodes
from worker.device.device import InterpretedDevice
from worker.gpu.build import build_gpu_runner
from worker.gpu.runner import GpuRunner

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": 2,
}
_LAYERS = 8, 16
_PROMPT, _STEPS, _REPEATS = 40, 20, 7


def microseconds(body: Callable[[], object], count: int) -> float:
    """The least mean of several runs of `count` calls."""
    body()
    best = float("inf")
    for _ in range(_REPEATS):
        start = time.perf_counter()
        for _ in range(count):
            body()
        best = min(best, (time.perf_counter() - start) / count)
    return best * 1e6


def runner_of(num_layers: int, quantization: str) -> GpuRunner:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps({**_LLAMA, "num_hidden_layers": num_layers}))
        options = Options.model_validate(
            {
                "model": folder,
                "device": "cuda",
                "load_format": "dummy",
                "max_num_seqs": 8,
                "max_num_batched_tokens": 64,
                "max_model_len": 512,
                "enforce_eager": True,
                "num_blocks_override": 64,
                "quantization": quantization,
            }
        )
        return build_gpu_runner(options, InterpretedDevice())


def step_time(num_layers: int, quantization: str) -> tuple[float, int]:
    """Microseconds of a decode of one row, and its launches."""
    runner = runner_of(num_layers, quantization)
    sampling = inference_pb2.SamplingParams(temperature=0.0)
    new = step_pb2.NewRow(
        sequence=9, token_ids=[5] * _PROMPT, num_prompt_tokens=_PROMPT, block_ids=range(1, 33), sampling=sampling
    )
    runner.execute(step_pb2.StepPlan(step=1, new_rows=[new], rows=[0], num_tokens=[_PROMPT]))
    plan = step_pb2.StepPlan(step=2, decode_rows=decodes(0))
    NullKernel.num_launches = 0
    runner.execute(plan)
    num_launches = NullKernel.num_launches
    return microseconds(lambda: runner.execute(plan), _STEPS), num_launches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triton", action="store_true", help="steps launch by Triton's own code")
    by_triton = parser.parse_args().triton
    install(compiles=False)
    args = launch_arguments({})
    grid, _ = args.pop("grid"), args.pop("warmup")
    print(f"a launch: {microseconds(lambda: copy_kernel[grid](**args), 5000):.1f} us")
    own = microseconds(lambda: JITFunction.run(copy_kernel, grid=grid, warmup=False, **args), 5000)
    print(f"a launch by Triton's own code: {own:.1f} us")
    if by_triton:
        Kernel.run = JITFunction.run
    for quantization in ("none", "fp8"):
        (small, few), (large, many) = (step_time(layers, quantization) for layers in _LAYERS)
        print(
            f"a decode step, quantization={quantization}, {_LAYERS[1]} layers: {large / 1e3:.2f} ms, {many} launches, "
            f"{large / many:.1f} us each; in a layer {(large - small) / (many - few):.1f} us each"
        )


if __name__ == "__main__":
    main()
