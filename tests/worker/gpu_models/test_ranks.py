"""Two GPU ranks give the same output as one: models, and a whole worker with graphs, over several epochs. Without GPUs,
Triton's kernels are interpreted and gloo connects the ranks, which are threads."""

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from triton import knobs

from configs.load import load_options
from configs.options import Options
from kernels.backend import Backend, gpu_backend
from kernels.linear import PackedLinear
from kernels.linear.weights import Fp8Weight, quantize_fp8_blocks, slice_inputs, slice_outputs
from kernels.shard import Shard
from protos import step_pb2
from protos.inference_pb2 import SamplingParams
from runtime.model_files import resolve_model
from tests.support.gpu.gpu_runs import GpuModelRun
from tests.support.gpu.interpreted_ranks import one_kernel_at_a_time
from tests.support.models.model_runs import relative_error
from tests.support.models.ranks import run_ranks
from tests.support.scheduler.steps import decodes
from worker.gpu.executor import GpuExecutor
from worker.models.loader import load_model
from worker.parallel.axes import axes_of
from worker.parallel.gloo import GlooGroup
from worker.parallel.group_init import connect_ranks
from worker.parallel.groups import Groups
from worker.process.build import build_runner

pytestmark = [
    pytest.mark.skipif(not knobs.runtime.interpret, reason="ranks have a GPU each, and are processes"),
    # The interpreter's numpy warns about memory that has never been written and about padding rows.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

# 67 tokens: the first rank has 34, the second 33.
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 67,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": 2,
}
# Both ranks hold its single KV head.
BIASED = {**LLAMA, "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
MIXTRAL = {**LLAMA, "architectures": ["MixtralForCausalLM"], "num_local_experts": 3, "num_experts_per_tok": 2}


@pytest.fixture(autouse=True)
def _kernels_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    one_kernel_at_a_time(monkeypatch)


def _directory(config: dict[str, Any], tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def _load(model: Path, group: GlooGroup | None, quantization: Any, backend: Backend) -> GpuExecutor:
    shard = Shard() if group is None else Shard(group.rank, group.size)
    loaded = load_model(
        resolve_model(str(model)),
        dtype=backend.compute_dtype,
        load_format="dummy",
        quantization=quantization,
        make_backend=lambda _: replace(backend, shard=shard),
    ).model
    return GpuExecutor(loaded, Groups() if group is None else Groups(tensor=group, experts=group))


@pytest.mark.parametrize(
    ("config", "quantization", "path"),
    [
        (BIASED, "none", {}),
        (LLAMA, "fp8", {"kv_cache_dtype": torch.float8_e4m3fn, "batch_invariant": True}),
        (MIXTRAL, "none", {}),
    ],
    ids=["biases", "fp8", "experts"],
)
def test_logits_of_two_ranks_are_those_of_one(
    config: dict[str, Any], quantization: Any, path: dict[str, Any], tmp_path: Path
) -> None:
    """Two ranks add sums in another order than one. In e4m3 each rank's part of a token's inputs has its own scale and
    so rounds differently, each input by up to 1/16: some percent of a sum."""
    model = _directory(config, tmp_path)
    dtype = torch.bfloat16 if quantization == "fp8" else torch.float32

    def logits(group: GlooGroup | None) -> torch.Tensor:
        loaded = _load(model, group, quantization, gpu_backend(dtype, torch.device("cpu"), **path))
        run = GpuModelRun(
            loaded.model, loaded.backend, block_size=8, num_blocks=17, max_rows=2, max_context=64, groups=loaded.groups
        )
        return torch.cat([run.step({0: [5, 9, 11, 66], 1: [7]}), run.step({1: [40], 0: [33]})]).float()

    expected = logits(None)
    first, second = run_ranks(tmp_path, 2, logits)
    assert torch.equal(first, second)
    assert relative_error(first, expected) < (0.05 if quantization == "fp8" else 1e-5)


def test_the_likeliest_is_the_whole_vocabularys(tmp_path: Path) -> None:
    """The first among equals wins, and all ranks see NaN, whichever rank has it."""
    model = _directory(LLAMA, tmp_path)

    def likeliest(group: GlooGroup) -> tuple[list[int], list[float]]:
        part_SP = torch.zeros(3, 34)
        part_SP[0, 5] = 2.0
        if group.rank == 1:
            # The last of its 34 columns belongs to no token.
            part_SP[1, 32], part_SP[1, 33], part_SP[2, 7] = 3.0, 9.0, torch.nan
        loaded = _load(model, group, "none", gpu_backend(torch.float32, torch.device("cpu")))
        with torch.inference_mode():
            ids_S, logits_S = loaded.likeliest(part_SP)
        return ids_S.tolist()[:2], logits_S.tolist()

    assert run_ranks(tmp_path, 2, likeliest) == [([5, 34 + 32], [2.0, 3.0, torch.inf])] * 2


def _options(model: Path, size: int, level: str) -> Options:
    flags = {
        "model": str(model),
        "device": "cuda",
        "dtype": "float32",
        "load_format": "dummy",
        "tensor_parallel_size": size,
        "block_size": 8,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 8,
        "max_model_len": 32,
        "num_blocks_override": 8,
        "max_steps_in_flight": 2,
        "compilation_config": {"level": level, "cudagraph_capture_sizes": [2, 8]},
    }
    return load_options(flags=flags, environ={})


def _plans() -> Iterable[step_pb2.StepPlan]:
    """A greedy row alone, then beside it a row that draws, wants logprobs and has biases."""
    greedy = step_pb2.NewRow(row=0, sequence=1, token_ids=[5, 9, 11], num_prompt_tokens=3, block_ids=[1, 2])
    greedy.sampling.CopyFrom(SamplingParams(temperature=0.0))
    drawn = step_pb2.NewRow(row=1, sequence=2, token_ids=[7, 8], num_prompt_tokens=2, block_ids=[3, 4])
    drawn.sampling.CopyFrom(SamplingParams(temperature=1.5, seed=3, top_k=9, logprobs=2, logit_bias={60: 1.0}))
    yield step_pb2.StepPlan(step=1, new_rows=[greedy], rows=[0], num_tokens=[3])
    yield step_pb2.StepPlan(step=2, decode_rows=decodes(0))
    yield step_pb2.StepPlan(step=3, decode_rows=decodes(0), new_rows=[drawn], rows=[1], num_tokens=[2])
    yield step_pb2.StepPlan(step=4, decode_rows=decodes(0, 1))


def _said(results: Iterable[step_pb2.StepResult]) -> list[tuple[bytes, list[int]]]:
    return [(each.token_ids, [entry.chosen.token_id for entry in each.logprobs]) for each in results]


@pytest.fixture(scope="module")
def said_by_one(tmp_path_factory: pytest.TempPathFactory) -> list[step_pb2.StepResult]:
    alone = build_runner(_options(_directory(LLAMA, tmp_path_factory.mktemp("alone")), 1, "NONE"))
    return [alone.begin(plan).result() for plan in _plans()]


@pytest.mark.parametrize(("level", "num_steps_of_epochs"), [("FULL", (4, 2)), ("PIECEWISE", (2,))])
def test_a_worker_of_two_ranks_says_what_one_says_in_each_epoch(
    level: str, num_steps_of_epochs: tuple[int, ...], said_by_one: list[step_pb2.StepResult], tmp_path: Path
) -> None:
    """Graphs contain calls to the groups with which they were captured; the second epoch has other groups."""
    options = _options(_directory(LLAMA, tmp_path), 2, level)

    def rank(number: int) -> list[step_pb2.StepResult]:
        runner = build_runner(options, rank=number)
        results = []
        for epoch, num_steps in enumerate(num_steps_of_epochs):
            address = f"file:{tmp_path / f'rendezvous-{epoch}'}"
            groups = connect_ranks(address, axes_of(options), number, call_timeout=60, while_waiting=lambda: None)
            runner.join(groups)
            results += [runner.begin(plan).result() for plan, _ in zip(_plans(), range(num_steps), strict=False)]
            runner.join(None)
            runner.reset()
        return results

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(rank, range(2))
    expected = [result for num_steps in num_steps_of_epochs for result in said_by_one[:num_steps]]
    assert _said(first) == _said(second) == _said(expected)


def test_scales_of_blocks_are_cut_at_the_block() -> None:
    """This also holds for GPU linears, which store scales in their own layout."""
    path = gpu_backend(torch.bfloat16, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    weight = quantize_fp8_blocks(torch.randn(256, 256, generator=generator) * torch.tensor([1.0, 9.0]).repeat(128))
    x = torch.randn(3, 256, generator=generator).bfloat16()
    whole = PackedLinear(weight, None, path)(x)
    halves = slice(0, 128), slice(128, 256)
    parts = [PackedLinear(_fp8(slice_outputs(weight, half)), None, path)(x) for half in halves]
    assert torch.equal(torch.cat(parts, 1), whole)
    parts = [PackedLinear(_fp8(slice_inputs(weight, half)), None, path)(x[:, half].contiguous()) for half in halves]
    # Each part is rounded to bfloat16.
    assert relative_error(parts[0].float() + parts[1].float(), whole.float()) < 0.01
    with pytest.raises(ValueError, match="outputs 64 to 191 of 256 would cut groups of 128 that share a scale: use a"):
        slice_outputs(weight, slice(64, 192))


def _fp8(weight: object) -> Fp8Weight:
    assert isinstance(weight, Fp8Weight)
    return weight
