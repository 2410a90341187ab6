"""Serving compiles nothing, and launches nothing without work. Triton compiles a kernel for each specialization of its
arguments, which takes seconds and stalls every stream; a launch takes Python some 50 us. A worker is built and
serves; its launches are recorded, not run."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.options import Options
from protos import inference_pb2, step_pb2
from tests.support.gpu.gpu import DEVICE
from tests.support.gpu.launches import recorded_launches
from tests.support.scheduler.steps import decodes
from worker.device.device import InterpretedDevice
from worker.gpu.build import build_gpu_runner

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="a GPU launches what it records")

_ROWS, _TOKENS, _BLOCK = 32, 128, 16
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": 2,
}
_DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "eos_token_id": 2,
}
_SAMPLING = (
    {},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"logprobs": 3},
    {"presence_penalty": 0.5, "repetition_penalty": 1.2, "min_tokens": 2},
    {"logit_bias": {5: 1.0}},
)


@dataclass
class _Row:
    num_tokens: int
    block_ids: list[int]
    num_computed: int = 0
    # Tokens still to sample.
    left: int = 40


@dataclass
class _Plans:
    """Plans of steps that mix chunks of prompts with decodes, and of steps that only decode."""

    num_blocks: int
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def __iter__(self) -> Iterator[step_pb2.StepPlan]:
        free, rows, sequence, step = [*range(1, self.num_blocks)], dict[int, _Row](), 1, 1
        while True:
            budget, new = int(self.rng.choice([16, 40, 90, _TOKENS])), list[step_pb2.NewRow]()
            freed = [row for row, held in rows.items() if held.num_computed >= held.num_tokens and held.left <= 0]
            for row in freed:
                free += rows.pop(row).block_ids
            decoding = [row for row in sorted(rows) if rows[row].num_computed >= rows[row].num_tokens][:budget]
            for row in decoding:
                rows[row].num_tokens += 1
                rows[row].left -= 1
            prompts: dict[int, int] = {}
            budget -= len(decoding)
            while budget and len(rows) + len(freed) < _ROWS and len(free) > _BLOCK and self.rng.random() < 0.6:
                row = next(row for row in range(_ROWS) if row not in rows and row not in freed)
                size, sequence = int(self.rng.integers(1, 150)), sequence + 1
                rows[row] = _Row(size, [free.pop() for _ in range(-(-(size + 40) // _BLOCK))])
                new.append(self._new(row, sequence, rows[row]))
            for row in sorted(rows):
                if row not in decoding and (count := min(rows[row].num_tokens - rows[row].num_computed, budget)):
                    prompts[row] = count
                    budget -= count
            for row, count in {**prompts, **dict.fromkeys(decoding, 1)}.items():
                rows[row].num_computed += count
            if not prompts and not decoding:
                continue
            yield step_pb2.StepPlan(
                step=step,
                freed_rows=freed,
                new_rows=new,
                rows=[*prompts],
                num_tokens=[*prompts.values()],
                decode_rows=decodes(*decoding) if decoding else b"",
            )
            step += 1

    def _new(self, row: int, sequence: int, held: _Row) -> step_pb2.NewRow:
        params: dict[str, Any] = _SAMPLING[self.rng.integers(len(_SAMPLING))]
        return step_pb2.NewRow(
            row=row,
            sequence=sequence,
            token_ids=self.rng.integers(3, 120, held.num_tokens).tolist(),
            num_prompt_tokens=held.num_tokens,
            block_ids=held.block_ids,
            sampling=inference_pb2.SamplingParams(**{"temperature": 0.0, "seed": sequence, **params}),
        )


def _options(folder: Path, config: dict[str, Any], **options: Any) -> Options:
    (folder / "config.json").write_text(json.dumps(config))
    return Options(
        model=str(folder),
        device="cuda",
        load_format="dummy",
        max_num_seqs=_ROWS,
        max_num_batched_tokens=_TOKENS,
        max_model_len=256,
        max_steps_in_flight=2,
        **options,
    )


@pytest.mark.parametrize(
    ("config", "options", "most"),
    [
        (_LLAMA, {}, 40),
        (_LLAMA, {"quantization": "fp8", "kv_cache_dtype": "fp8"}, 40),
        (_LLAMA, {"enforce_eager": True}, 40),
        (_DEEPSEEK, {}, 45),
    ],
    ids=["bf16", "fp8", "eager", "latents and experts"],
)
def test_serving_launches_only_what_the_start_has_compiled(
    config: dict[str, Any], options: dict[str, Any], most: int, tmp_path: Path
) -> None:
    given = _options(tmp_path, config, **options)
    with recorded_launches() as launches:
        runner = build_gpu_runner(given, InterpretedDevice(memory_bytes=1 << 28))
        compiled = set(launches.keys)
        assert len(compiled) < most, Counter(name for name, _ in compiled)
        launches.clear()
        steps = [plan for plan, _ in zip(_Plans(runner.model_info.num_blocks), range(200), strict=False)]
        for plan in steps:
            runner.execute(plan)
    late = set(launches.keys) - compiled
    assert not late, "\n".join(f"{name} {key}" for name, key in sorted(late))
    # Otherwise the test shows little.
    assert sum(bool(plan.rows and plan.decode_rows) for plan in steps) > 50
    assert sum(not plan.rows for plan in steps) > 20


def test_a_step_launches_attention_only_for_rows_that_it_has(tmp_path: Path) -> None:
    """Prompts alone have no decodes; contexts of one chunk of 512 tokens need no reduction."""
    given = _options(tmp_path, _LLAMA, num_blocks_override=64, enforce_eager=True)
    sampling = inference_pb2.SamplingParams(temperature=0.0)
    news = [
        step_pb2.NewRow(
            row=row,
            sequence=1 + row,
            token_ids=[5] * 20,
            num_prompt_tokens=20,
            block_ids=[1 + 2 * row, 2 + 2 * row],
            sampling=sampling,
        )
        for row in range(2)
    ]
    plans = {
        "a prompt": step_pb2.StepPlan(step=1, new_rows=news[:1], rows=[0], num_tokens=[20]),
        "both": step_pb2.StepPlan(step=2, new_rows=news[1:], rows=[1], num_tokens=[20], decode_rows=decodes(0)),
    }
    launched: dict[str, set[str]] = {}
    with recorded_launches() as launches:
        runner = build_gpu_runner(given, InterpretedDevice())
        for name, plan in plans.items():
            launches.clear()
            runner.execute(plan)
            launched[name] = {"prefill_kernel", "decode_kernel", "reduce_kernel"} & {*launches.names}
    assert launched == {"a prompt": {"prefill_kernel"}, "both": {"prefill_kernel", "decode_kernel"}}
