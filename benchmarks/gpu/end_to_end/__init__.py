"""Times steps of whole models by the engine of GPU workers, with random weights: eager and by CUDA graphs, with one and
with two steps in flight.

Of a worker it uses the engine, the models and the KV cache. A schedule of known lengths (schedule.py) stands in for
schedulers, routers and wires, so that neither protos/ nor their dependencies are imported.
"""

import gc

import torch

from benchmarks.gpu.end_to_end.checks import check_logits, check_ways
from benchmarks.gpu.end_to_end.measures import Measures, Sizes
from benchmarks.gpu.end_to_end.model_run import BLOCK_SIZE, MAX_STEPS_IN_FLIGHT, Limits, ModelRun, path_of
from benchmarks.gpu.end_to_end.random_weights import RandomWeights
from benchmarks.gpu.end_to_end.schedule import num_blocks_of
from benchmarks.gpu.end_to_end.shapes import TOY_VARIANTS, VARIANTS, Variant
from benchmarks.gpu.report import Report
from worker.device.device import CudaDevice, Device, InterpretedDevice
from worker.layers.kv_cache import KVCache

OP = "end_to_end"

_LIMITS = Limits(max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=2048)
SIZES = Sizes(
    checked=(29, 11, 1, 1),
    checked_requests=(8, 64, 32),
    batches=(1, 256, 64, 8),
    context=512,
    num_warm_steps=16,
    num_steps=96,
    step_tokens=(8192, 2048),
    prompt=1024,
    num_prompts=32,
    num_requests=256,
    lengths=(100, 1024),
)
TOY_LIMITS = Limits(max_num_seqs=3, max_num_batched_tokens=16, max_model_len=24, capture_sizes=(2, 8))
TOY_SIZES = Sizes(
    checked=(3, 1),
    checked_requests=(2, 4, 2),
    batches=(2,),
    context=4,
    num_warm_steps=1,
    num_steps=1,
    step_tokens=(8,),
    prompt=4,
    num_prompts=2,
    num_requests=3,
    lengths=(1, 2),
)
# Bytes that weights and KV leave to graphs, workspace and logits.
_ROOM = 10 << 30
# Time to build a model, check it, and capture its graphs; compiling kernels takes most of it.
_SECONDS = 20.0


def run(report: Report, *, toy: bool) -> None:
    # The interpreter claims to have enough memory.
    device = InterpretedDevice(memory_bytes=2 * _ROOM) if toy else CudaDevice()
    sizes, limits = (TOY_SIZES, TOY_LIMITS) if toy else (SIZES, _LIMITS)
    variants = TOY_VARIANTS if toy else VARIANTS
    for index, variant in enumerate(variants):
        # bf16 gets twice the time of fp8; time that one leaves goes to the next.
        parts = [1 if each.fp8 else 2 for each in variants[index:]]
        with report.within(parts[0] / sum(parts)):
            report.attempt(
                OP, variant.name, lambda variant=variant: measure_variant(report, variant, device, sizes, limits)
            )
        # An engine and its graphs refer to one another.
        gc.collect()


def measure_variant(report: Report, variant: Variant, device: Device, sizes: Sizes, limits: Limits) -> None:
    """Checks and times one variant. Raises AssertionError if its logits are wrong; ways that give other tokens than
    eager steps are left out."""
    if not report.has_time(_SECONDS):
        report.skip(OP, variant.name, "no time left")
        return
    num_blocks = _num_blocks(sizes, variant)
    if (lacking := _lacking_bytes(variant, device, num_blocks)) > 0:
        report.skip(OP, variant.name, f"{lacking / 2**30:.1f} GiB more GPU memory are needed")
        return
    with torch.inference_mode():
        check_logits(report, OP, variant, device.torch_device, sizes.checked)
        measures = Measures(report, OP, ModelRun(variant, device, limits, num_blocks), sizes)
        ways = check_ways(report, OP, measures.run, sizes.requests_to_check(variant.config.vocab_size))
        for step_tokens in sizes.step_tokens:
            measures.prefills(step_tokens, ways[0])
        # The least informative figures come last: they are skipped when time runs out.
        for num_in_flight in (MAX_STEPS_IN_FLIGHT, 1):
            measured = [way for way in ways if way.num_in_flight == num_in_flight]
            for num_rows in sizes.batches:
                measures.decodes(num_rows, measured)
            for way in measured:
                measures.throughput(way)


def _num_blocks(sizes: Sizes, variant: Variant) -> int:
    """Blocks of the KV cache: enough for the throughput's requests, and for the largest batch of decodes."""
    context = sizes.context + sizes.num_warm_steps + sizes.num_steps
    decodes = max(sizes.batches) * -(-context // BLOCK_SIZE)
    prompts = sizes.num_prompts * -(-sizes.prompt // BLOCK_SIZE)
    requests = num_blocks_of(sizes.requests(variant.config.vocab_size), BLOCK_SIZE)
    return max(decodes + 1, prompts + 1, requests)


def _lacking_bytes(variant: Variant, device: Device, num_blocks: int) -> int:
    path = path_of(variant, device.torch_device)
    weights = RandomWeights(variant, device.torch_device, path.compute_dtype).num_bytes
    kv = num_blocks * KVCache.block_bytes(variant.config, BLOCK_SIZE, path.kv_cache_dtype)
    return weights + kv + _ROOM - device.memory().free
