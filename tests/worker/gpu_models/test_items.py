"""Items on the GPU path, in Triton's interpreter: prompts with items say what the CPU path says, whose positions have
three axes, too; and prefills with items run without graphs, between others that are replayed."""

import threading
from typing import Any

import pytest
import torch
from triton import knobs

from kernels.backend import torch_backend
from protos import inference_pb2, step_pb2
from tests.fakes.gpu.recording_device import RecordingDevice
from tests.support.gpu.gpu import DEVICE
from tests.support.gpu.small_llama import VOCABULARY, small_llama
from tests.support.gpu.stream_checker import checked_streams
from tests.support.models.spelled_items import SpelledEncoder, to_encode
from tests.support.scheduler.steps import decodes, said
from worker.cpu.executor import CpuExecutor
from worker.cpu.runner import Runner
from worker.device.device import InterpretedDevice
from worker.encoders.cache import EncoderCache
from worker.encoders.items import Items
from worker.errors import PlanError
from worker.gpu.engine import GpuEngine
from worker.gpu.executor import GpuExecutor
from worker.gpu.graphs import CapturedGraphs, GraphSizes
from worker.gpu.runner import GpuRunner
from worker.gpu.swap import GpuSwapSpace
from worker.layers.kv_cache import KVCache
from worker.step.items import ItemTokens
from worker.step.rows import Rows

pytestmark = [
    pytest.mark.skipif(not knobs.runtime.interpret, reason="a recording is one of the interpreter"),
    # The interpreter's numpy warns about memory that has never been written and about padding rows.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

PLACEHOLDER = 60
WORDS = [11, 12, 13, 14, 15, 16]
# Its three axes differ, and the tokens behind it are shifted.
PROMPT = [5, 6, *[PLACEHOLDER] * 6, 7]
ITEM = step_pb2.RowItem(number=4, first_token=2, num_tokens=6, grid=[1, 2, 3])
SIZES = GraphSizes(decodes=(2, 4), pieces=(8,))
SAMPLING = inference_pb2.SamplingParams(temperature=0.0, ignore_eos=True)


def _rows(has_axes: bool) -> Rows:
    return Rows(
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=32,
        block_size=8,
        num_blocks=30,
        vocab_size=VOCABULARY,
        eos_token_ids=frozenset(),
        item_tokens=ItemTokens(embedded=frozenset({PLACEHOLDER}), has_axes=has_axes),
    )


def _items(runner_device: torch.device) -> Items:
    table_VE = torch.randn(VOCABULARY, 32, generator=torch.Generator().manual_seed(9))
    cache = EncoderCache(16, 32, torch.float32, runner_device)
    items = Items(SpelledEncoder(table_VE), cache, most_input_bytes=1000)
    done = threading.Event()
    items.prepare(to_encode(4, WORDS), done.set)
    assert done.wait(30)
    return items


def _changes(has_axes: bool) -> dict[str, Any]:
    return {"mrope_section": (8, 12, 12)} if has_axes else {}


def cpu_runner(has_axes: bool) -> Runner:
    backend = torch_backend(torch.float32)
    model = small_llama(1, backend, **_changes(has_axes))
    cache = KVCache(model.config, num_blocks=31, block_size=8, backend=backend)
    info = inference_pb2.ModelInfo(vocab_size=VOCABULARY)
    return Runner(CpuExecutor(model), cache, _rows(has_axes), info, items=_items(backend.device))


def gpu_runner(
    has_axes: bool, *, graphs: bool, device: InterpretedDevice | None = None
) -> tuple[GpuRunner, CapturedGraphs | None]:
    device = device or (RecordingDevice() if graphs else InterpretedDevice())
    model = small_llama(1, **_changes(has_axes))
    executor, captured = GpuExecutor(model), None
    cache = KVCache(model.config, num_blocks=31, block_size=8, backend=model.backend)
    engine = GpuEngine(
        executor,
        cache,
        device,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=32,
        vocab_size=VOCABULARY,
        max_steps_in_flight=2,
        has_axes=has_axes,
    )
    if graphs:
        captured = CapturedGraphs(engine, executor, cache, device, SIZES)
        captured.capture()
        engine.graphs = captured
    runner = GpuRunner(
        engine,
        _rows(has_axes),
        inference_pb2.ModelInfo(),
        swap_space=GpuSwapSpace(cache, device, 0),
        max_steps_in_flight=2,
        device=device,
        items=_items(device.torch_device),
    )
    return runner, captured


def _new(row: int, tokens: list[int], blocks: list[int], *items: step_pb2.RowItem) -> step_pb2.NewRow:
    return step_pb2.NewRow(
        row=row,
        sequence=row + 1,
        token_ids=tokens,
        num_prompt_tokens=len(tokens),
        block_ids=blocks,
        sampling=SAMPLING,
        items=items,
    )


# A row of text and one with an item; chunks end before the item, within it and behind it; then both decode.
PLANS = [
    step_pb2.StepPlan(new_rows=[_new(1, [8, 9, 10], [9, 10])], rows=[1], num_tokens=[3]),
    step_pb2.StepPlan(
        new_rows=[_new(0, PROMPT, [3, 1, 2], ITEM)], decode_rows=decodes(1), rows=[0], num_tokens=[1], encoded_items=[4]
    ),
    step_pb2.StepPlan(decode_rows=decodes(1), rows=[0], num_tokens=[4]),
    step_pb2.StepPlan(decode_rows=decodes(1), rows=[0], num_tokens=[4]),
    step_pb2.StepPlan(decode_rows=decodes(1, 0)),
    step_pb2.StepPlan(decode_rows=decodes(0)),
    step_pb2.StepPlan(decode_rows=decodes(0, 1), dropped_items=[4], forgotten_items=[4]),
]


def _said(runner: Runner | GpuRunner) -> list[list[int]]:
    return [said(runner.execute(plan)).token_ids for plan in PLANS]


@pytest.mark.parametrize("has_axes", [False, True])
def test_as_on_a_cpu(has_axes: bool) -> None:
    expected = _said(cpu_runner(has_axes))
    # Without graphs: test_steps_overlap.
    runner, graphs = gpu_runner(has_axes, graphs=True)
    assert _said(runner) == expected
    assert graphs is not None
    # Decodes are replayed. Of the four prefills, two read embeddings: these run without graphs.
    assert (graphs.num_full, graphs.num_in_pieces) == (3, 2)


def test_steps_overlap() -> None:
    expected = _said(cpu_runner(True))
    runner, _ = gpu_runner(True, graphs=False)
    results, made = [], []
    for plan in PLANS:
        results.append(runner.begin(plan))
        if len(results) == 2:
            made.append(said(results.pop(0).result()).token_ids)
    made += [said(result.result()).token_ids for result in results]
    assert made == expected


@pytest.mark.skipif(DEVICE != "cpu", reason="watches what the interpreter does")
def test_items_and_steps_are_ordered_by_the_device() -> None:
    """Embeddings are encoded, read and dropped on the stream of the steps that read them."""
    expected = _said(cpu_runner(True))
    with checked_streams() as checker:
        runner, _ = gpu_runner(True, graphs=False, device=checker.device())
        assert _said(runner) == expected
        runner.reset()
    assert checker.num_accesses["stream 1"] > 100


def test_a_prompt_may_end_in_an_item_that_looks_like_a_decode() -> None:
    tokens = PROMPT[:-1]
    first = step_pb2.StepPlan(new_rows=[_new(0, tokens, [3, 1], ITEM)], rows=[0], num_tokens=[7], encoded_items=[4])
    plans = [first, *[step_pb2.StepPlan(decode_rows=decodes(0))] * 3]
    cpu = cpu_runner(True)
    expected = [said(cpu.execute(plan)).token_ids for plan in plans]
    runner, graphs = gpu_runner(True, graphs=True)
    assert [said(runner.execute(plan)).token_ids for plan in plans] == expected
    assert graphs is not None
    assert graphs.num_full == 2


def test_plans_that_cannot_be_are_refused_before_anything_is_queued() -> None:
    runner, _ = gpu_runner(False, graphs=False)
    with pytest.raises(PlanError, match="rows: the step computes tokens of item 4, which no plan has encoded"):
        runner.begin(step_pb2.StepPlan(new_rows=[_new(0, PROMPT, [3, 1], ITEM)], rows=[0], num_tokens=[9]))
    runner.reset()
    with pytest.raises(PlanError, match="encoded_items: item 4 is not prepared"):
        runner.begin(step_pb2.StepPlan(new_rows=[_new(0, [5, 6], [3])], rows=[0], num_tokens=[2], encoded_items=[4]))
