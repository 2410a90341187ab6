"""Times the vLLM V1 scheduler alone: benchmarks/scheduler/cost.py runs this in vLLM's environment.

Reads a line of JSON for each measurement from standard input: {prompts, block_size, steps}; all prompts decode at once.
Writes a line for each: {schedule_us, update_us}, medians over the steps. It uses nothing of Octavo.
"""
# pyright: reportMissingImports=false

import gc
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")

import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

# Steps that do not count, as for Octavo: the prefills, and the first, slow decodes.
NUM_FIRST = 28

# A dummy model, from which the scheduler reads its context length.
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "torch_dtype": "float32",
}


def make_scheduler(model: str, num_seqs: int, prompt_len: int, steps: int, block_size: int) -> Scheduler:
    max_model_len = prompt_len + steps + 64
    num_blocks = num_seqs * (max_model_len // block_size + 1) + 1
    model_config = ModelConfig(model=model, skip_tokenizer_init=True, dtype="float32", max_model_len=max_model_len)
    cache_config = CacheConfig(block_size=block_size, enable_prefix_caching=True)
    cache_config.num_gpu_blocks = num_blocks
    config = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_num_seqs=num_seqs,
            max_num_batched_tokens=max(num_seqs * prompt_len, max_model_len),
            max_model_len=max_model_len,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        model_config=model_config,
        cache_config=cache_config,
    )
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        log_stats=False,
    )


def measure(model: str, prompts: list[list[int]], block_size: int, steps: int) -> dict[str, float]:
    scheduler = make_scheduler(model, len(prompts), max(map(len, prompts)), steps, block_size)
    hasher = get_request_block_hasher(block_size, sha256)
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=steps + 32, temperature=1.0, seed=index)
        sampling.update_from_generation_config({}, 2)
        scheduler.add_request(
            Request(
                request_id=str(index),
                prompt_token_ids=prompt,
                sampling_params=sampling,
                pooling_params=None,
                block_hasher=hasher,
            )
        )
    # A core that has been idle is slow at first.
    until = time.perf_counter() + 0.5
    while time.perf_counter() < until:
        pass
    # As vLLM's engine does once it is set up.
    gc.collect()
    gc.freeze()
    schedule_us: list[float] = []
    update_us: list[float] = []
    for _ in range(NUM_FIRST + steps):
        begin = time.perf_counter()
        output = scheduler.schedule()
        scheduled = time.perf_counter()
        ids = list(output.num_scheduled_tokens)
        assert len(ids) == len(prompts)
        said = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request: index for index, request in enumerate(ids)},
            sampled_token_ids=[[7] for _ in ids],
        )
        started = time.perf_counter()
        scheduler.update_from_output(output, said)
        ended = time.perf_counter()
        schedule_us.append(1e6 * (scheduled - begin))
        update_us.append(1e6 * (ended - started))
    schedule_us, update_us = schedule_us[NUM_FIRST:], update_us[NUM_FIRST:]
    return {"schedule_us": statistics.median(schedule_us), "update_us": statistics.median(update_us)}


def main() -> None:
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as model:
        (Path(model) / "config.json").write_text(json.dumps(MODEL))
        # Whatever vLLM prints must not come between the answers.
        answers, sys.stdout = sys.stdout, sys.stderr
        for line in sys.stdin:
            asked = json.loads(line)
            print(json.dumps(measure(model, asked["prompts"], asked["block_size"], asked["steps"])), file=answers)
            answers.flush()


if __name__ == "__main__":
    main()
