"""A worker process with device=cuda: sockets, memory, graphs, steps ahead of their results. Without a GPU, Triton's
kernels are interpreted (tests/conftest.py), with the same inputs."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from configs.load import load_options
from protos import inference_pb2, step_pb2
from tests.fakes.step_scheduler import StepScheduler
from tests.support.repository import ROOT
from tests.support.scheduler.steps import decodes, said
from worker.cpu.build import build_cpu_runner

# A head size that the GPU kernels support, otherwise as small as possible: interpreted kernels take ms per program.
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": 2,
}
FLAGS = {
    "load_format": "dummy",
    "dtype": "float32",
    "max_num_seqs": 2,
    "max_num_batched_tokens": 8,
    "block_size": 8,
    "worker_threads": 1,
    "metrics_port": 0,
    "max_steps_in_flight": 2,
}
FULL = json.dumps({"level": "FULL", "cudagraph_capture_sizes": [2, 8]})


def plans() -> list[step_pb2.StepPlan]:
    """A prompt in one step; another in chunks beside the first one's decodes; then both decode."""
    greedy = inference_pb2.SamplingParams(temperature=0.0)
    drawn = inference_pb2.SamplingParams(temperature=1.0, top_p=0.9, seed=7)
    first = step_pb2.NewRow(
        row=0, sequence=1, token_ids=range(10, 15), num_prompt_tokens=5, block_ids=[3, 1], sampling=greedy
    )
    second = step_pb2.NewRow(
        row=1, sequence=2, token_ids=range(40, 52), num_prompt_tokens=12, block_ids=[2, 4, 5], sampling=drawn
    )
    return [
        step_pb2.StepPlan(new_rows=[first], rows=[0], num_tokens=[5]),
        step_pb2.StepPlan(new_rows=[second], rows=[0, 1], num_tokens=[1, 7]),
        step_pb2.StepPlan(rows=[0, 1], num_tokens=[1, 5]),
        *[step_pb2.StepPlan(decode_rows=decodes(0, 1)) for _ in range(4)],
        step_pb2.StepPlan(freed_rows=[0], decode_rows=decodes(1)),
    ]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(TINY))
    return path


def run_on_gpu(
    directory: Path, model: Path, **changes: object
) -> tuple[step_pb2.Ready, list[step_pb2.StepResult], str]:
    """Runs a worker; returns its Ready, its results and its log. Sends each plan before it takes the last result."""
    directory.mkdir()
    endpoint = f"ipc://{directory}/step.sock"
    flags = {**FLAGS, "model": str(model), "device": "cuda", "step_addresses": endpoint, **changes}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_")}
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    with (
        StepScheduler(endpoint) as scheduler,
        subprocess.Popen(
            [sys.executable, "-m", "worker", *arguments], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
        ) as worker,
    ):
        try:
            ready = scheduler.join()
            results: list[step_pb2.StepResult] = []
            for step, plan in enumerate(plans()):
                scheduler.send_plan(plan)
                if step:
                    results.append(scheduler.expect("result"))
            results.append(scheduler.expect("result"))
            worker.terminate()
            _, log = worker.communicate(timeout=60)
        finally:
            worker.kill()
    assert worker.returncode == 0, log
    return ready, results, log


def test_tokens_are_those_of_a_cpu_eagerly_and_in_graphs(tmp_path: Path, model: Path):
    """The whole path: profile, KV cache in the memory left, capture, decodes in full graphs, prompts in pieces."""
    with ThreadPoolExecutor() as threads:
        eager = threads.submit(run_on_gpu, tmp_path / "eager", model, enforce_eager=True, gpu_memory_utilization=0.01)
        graphs = threads.submit(run_on_gpu, tmp_path / "graphs", model, compilation_config=FULL, num_blocks_override=8)
        runner = build_cpu_runner(load_options(flags={**FLAGS, "model": str(model)}, environ={}))
        expected = [said(runner.execute(plan)) for plan in plans()]
        assert [step.sequences for step in expected] == [[1], [1], [1, 2], *4 * [[1, 2]], [2]]
        for ready, results, log in (eager.result(), graphs.result()):
            assert [said(result) for result in results] == expected
            assert ready.model.max_model_len == 64
            assert ready.model.fingerprint != runner.model_info.fingerprint, "fingerprints of two devices must differ"
            assert "computed by triton-" in log
    ready, _, log = eager.result()
    assert f"KV cache 0.01 ({ready.model.num_blocks} blocks" in log, "the log does not account for all memory"
    assert "CUDA graphs: " not in log
    assert "CUDA graphs: 1 sizes of decodes, 0 of decodes with drafts, 2 of pieces" in graphs.result()[2]
