"""Whole models: decodes of 1, 8, 64 and 256 rows by graphs, prefills, a mixed step, and where their time goes.

`models_fp8` and `models_bf16` beside this file name the variant, so that each has a process, and its memory, of its
own. Checks come first, as in end_to_end, whose engine and measures these are.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.end_to_end import SIZES, TOY_LIMITS, TOY_SIZES, checks
from benchmarks.gpu.end_to_end.measures import Measures
from benchmarks.gpu.end_to_end.model_run import BLOCK_SIZE, WAYS, Limits, ModelRun, Way
from benchmarks.gpu.end_to_end.schedule import Request, Schedule
from benchmarks.gpu.end_to_end.shapes import Variant
from benchmarks.gpu.report import Report
from worker.device.device import CudaDevice, InterpretedDevice

OP = "models"
_GRAPHS, _EAGER = WAYS[0], WAYS[1]
# 2,048 is max_num_batched_tokens' default, up to which steps may run in pieces.
_LIMITS = Limits(max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=17 << 10)
_SIZES = replace(
    SIZES,
    checked_requests=(8, 64, 8),
    num_warm_steps=8,
    num_steps=64,
    step_tokens=(2048,),
    num_prompts=8,
    num_requests=64,
)
# Rows that decode in the mixed step, tokens of the prompt in it, and steps that are timed.
_MIXED, _TOY_MIXED = (88, 512, 8), (1, 3, 2)
_LONG_CONTEXT = 16 << 10
# Steps that a profile covers.
_PROFILED = 8
_SECONDS = 8.0


def measure(report: Report, variant: Variant, *, toy: bool) -> None:
    """Checks, times and profiles one variant; profiles go to files in the report's folder."""
    device = InterpretedDevice(memory_bytes=64 << 30) if toy else CudaDevice()
    sizes, limits = (TOY_SIZES, TOY_LIMITS) if toy else (_SIZES, _LIMITS)
    mixed = _TOY_MIXED if toy else _MIXED
    context = sizes.context + sizes.num_warm_steps + sizes.num_steps
    num_blocks = 2 + max(
        max(sizes.batches) * -(-context // BLOCK_SIZE),
        mixed[0] * -(-context // BLOCK_SIZE) + -(-(sizes.context + mixed[1] * (mixed[2] + 2)) // BLOCK_SIZE),
        -(-(_LONG_CONTEXT + 128) // BLOCK_SIZE),
    )
    with torch.inference_mode():
        checks.check_logits(report, OP, variant, device.torch_device, sizes.checked)
        measures = Measures(report, OP, ModelRun(variant, device, limits, num_blocks), sizes)
        run = measures.run
        ways = checks.check_ways(report, OP, run, sizes.requests_to_check(variant.config.vocab_size))
        report.note(OP, f"{variant.name}, GiB of graphs", f"{run.graphs.num_bytes / 2**30:.2f}")
        ways = [way for way in (_GRAPHS, _EAGER) if way in ways]
        for num_rows in sizes.batches:
            measures.decodes(num_rows, ways[:1])
        _mixed_steps(report, measures, ways, mixed)
        for step_tokens in sizes.step_tokens:
            measures.prefills(step_tokens, ways[0])
        for num_rows in sizes.batches:
            if num_rows != 8:
                schedule = measures.decode_schedule(num_rows, _PROFILED)
                _profile(report, run, f"{variant.name}, decode of {num_rows}", schedule, ways[0])
        for way in ways:
            schedule, _ = _mixed(measures, mixed)
            _profile(report, run, f"{variant.name}, mixed, {way.name}", schedule, way)
        if not toy and report.has_time(_SECONDS):
            long = Measures(report, OP, run, replace(sizes, context=_LONG_CONTEXT, num_steps=32))
            long.decodes(1, ways[:1])


def _mixed(measures: Measures, mixed: tuple[int, int, int]) -> tuple[Schedule, int]:
    """Steps of rows that decode beside parts of one long prompt, and the tokens of such a step."""
    num_rows, num_tokens, num_steps = mixed
    context, vocab_size = measures.sizes.context, measures.run.variant.config.vocab_size
    rng = np.random.default_rng(0)

    def prompt(length: int) -> np.ndarray:
        return rng.integers(vocab_size, size=length).astype(np.int32)

    # All but the last token of the short prompts is computed, and as much of the long one.
    requests = [Request(prompt(context), num_steps + 3) for _ in range(num_rows)]
    requests.append(Request(prompt(context - 1 + num_tokens * (num_steps + 1)), 1))
    budget = num_rows + num_tokens
    schedule = Schedule(
        requests,
        block_size=BLOCK_SIZE,
        num_blocks=measures.run.kv_cache.num_blocks,
        max_num_batched_tokens=budget,
        num_computed=context - 1,
    )
    return schedule, budget


def _mixed_steps(report: Report, measures: Measures, ways: list[Way], mixed: tuple[int, int, int]) -> None:
    _, _, num_steps = mixed
    for way in ways:
        if not report.has_time(_SECONDS / 2):
            report.skip(OP, f"{measures.run.variant.name}, mixed, {way.name}", "no time left")
            continue
        # The first run compiles.
        measures.run.run(_mixed(measures, mixed)[0], way)
        in_pieces = measures.run.graphs.num_in_pieces
        schedule, num_tokens = _mixed(measures, mixed)
        times = measures.run.run(schedule, way)
        seconds = float("nan") if report.toy else (times[num_steps + 1] - times[1]) / num_steps
        report.row(
            OP,
            f"{measures.run.variant.name}, mixed step of {num_tokens}",
            way.name,
            seconds * 1e3,
            tokens_per_s=num_tokens / seconds,
            steps_in_pieces=float(measures.run.graphs.num_in_pieces - in_pieces),
        )


def _profile(report: Report, run: ModelRun, name: str, schedule: Schedule, way: Way) -> None:
    """Writes a table of the kernels that a schedule spends its time in, to a file named after it."""
    if not report.has_time(_SECONDS / 2):
        report.skip(OP, f"{name}, profile", "no time left")
        return

    def table() -> None:
        activities = [ProfilerActivity.CPU] + ([] if report.toy else [ProfilerActivity.CUDA])
        with profile(activities=activities) as found:
            run.run(schedule, way)
        order = "self_cpu_time_total" if report.toy else "self_cuda_time_total"
        folder = Path("profiles") if report.folder is None else report.folder
        folder.mkdir(exist_ok=True)
        file = folder / f"{name.replace(', ', '-').replace(' ', '_')}.txt"
        file.write_text(found.key_averages().table(sort_by=order, row_limit=45, max_name_column_width=90))
        report.note(OP, f"{name}, profile", file.name)

    report.attempt(OP, f"{name}, profile", table)
