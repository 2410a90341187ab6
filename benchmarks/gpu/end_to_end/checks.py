"""Checks that must pass before anything is timed."""

import numpy as np
import torch

from benchmarks.gpu.end_to_end.model_run import BLOCK_SIZE, WAYS, ModelRun, Way, path_of
from benchmarks.gpu.end_to_end.random_weights import RandomWeights
from benchmarks.gpu.end_to_end.reference import reference_logits
from benchmarks.gpu.end_to_end.schedule import Request, Schedule
from benchmarks.gpu.end_to_end.shapes import Variant
from benchmarks.gpu.report import Report
from worker.gpu.executor import GpuExecutor
from worker.layers.kv_cache import KVCache
from worker.models.families.llama import LlamaModel
from worker.step.batch import GpuBatch


def check_logits(report: Report, op: str, variant: Variant, device: torch.device, step_tokens: tuple[int, ...]) -> None:
    """Checks the logits of the variant with two layers against float32: one sequence, in steps of `step_tokens`."""
    variant = variant.with_layers(2)
    path = path_of(variant, device)
    weights = RandomWeights(variant, device, path.compute_dtype)
    model = GpuExecutor(LlamaModel(variant.config, weights, path))
    num_tokens = sum(step_tokens)
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    kv_cache = KVCache(variant.config, num_blocks=num_blocks + 1, block_size=BLOCK_SIZE, backend=path)
    model.reserve(max_tokens=num_tokens, max_rows=1, max_context=num_tokens)
    blocks = torch.arange(num_blocks, 0, -1, dtype=torch.int32, device=device)
    generator = torch.Generator(device).manual_seed(0)
    token_ids_T = torch.randint(
        variant.config.vocab_size, (num_tokens,), generator=generator, device=device, dtype=torch.int32
    )
    logits, done = [], 0
    for length in step_tokens:
        batch = _batch(token_ids_T, blocks, done, length)
        logits.append(model.logits(model.forward(batch, kv_cache)).float())
        done += length
    expected_TV = reference_logits(variant.config, weights, token_ids_T)
    error = (torch.cat(logits) - expected_TV).square().mean().sqrt() / expected_TV.square().mean().sqrt()
    # bf16 rounds by 2^-9 at most, some twenty times on the way; Triton's interpreter truncates instead: 0.8% there.
    # e4m3 rounds inputs of linears or KV by 2^-4: 5 to 7%. A mistake in a kernel gives nearer to 100%.
    is_bf16 = not variant.fp8 and variant.kv_cache_dtype is torch.bfloat16
    report.check(op, f"{variant.name}, logits", error, torch.zeros(()), rtol=0, atol=0.02 if is_bf16 else 0.15)


def _batch(token_ids_T: torch.Tensor, blocks: torch.Tensor, done: int, length: int) -> GpuBatch:
    """The batch of the sequence's next tokens."""
    device = token_ids_T.device
    positions = torch.arange(done, done + length, device=device)
    return GpuBatch(
        # A copy, since kernels are compiled anew for unaligned tensors.
        token_ids_T=token_ids_T[done : done + length].clone(),
        positions_T=positions.int(),
        slots_T=blocks[positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE,
        rows_S=torch.zeros(1, dtype=torch.int32, device=device),
        query_starts=torch.tensor([0, length], dtype=torch.int32, device=device),
        context_lens_S=torch.tensor([done + length], dtype=torch.int32, device=device),
        block_tables_RB=blocks[None],
        max_query_len=length,
    )


def check_ways(report: Report, op: str, run: ModelRun, requests: list[Request]) -> list[Way]:
    """Returns the ways that give the same tokens as eager steps one by one; the report names the others. Captures the
    graphs.

    All prompts form one step, and each step has as many rows or tokens as some graph: for another number of rows,
    padding included, cuBLAS sums in another order, which may change a token.
    """
    case, eager = f"{run.variant.name}, tokens", WAYS[-1]
    expected = _tokens(run, requests, eager)
    captured = report.attempt(op, f"{run.variant.name}, capture", run.graphs.capture)
    good = [eager]
    for way in reversed(WAYS[:-1]):

        def check(way: Way = way) -> None:
            report.check(op, f"{case}, {way.name}", _tokens(run, requests, way), expected, rtol=0, atol=0)

        if (captured or not way.graphs) and report.attempt(op, f"{case}, {way.name}", check):
            good.append(way)
    return [way for way in WAYS if way in good]


def _tokens(run: ModelRun, requests: list[Request], way: Way) -> torch.Tensor:
    schedule = Schedule(
        requests,
        block_size=BLOCK_SIZE,
        num_blocks=run.kv_cache.num_blocks,
        max_num_batched_tokens=run.limits.max_num_batched_tokens,
    )
    run.run(schedule, way)
    assert np.all(schedule.tokens_RO >= 0), "every request gets all its tokens"
    return torch.from_numpy(schedule.tokens_RO)
