"""Work of several streams and threads is ordered by the device, not by luck."""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from kernels.kv_cache.swap.torch_gpu import BlockSwap
from protos import inference_pb2, step_pb2
from protos.inference_pb2 import SamplingParams
from tests.fakes.gpu.gpu_model import fake_kv_cache
from tests.support.gpu.gpu import DEVICE
from tests.support.gpu.gpu_engine import EngineRun, outputs_alone
from tests.support.gpu.small_llama import VOCABULARY, small_llama
from tests.support.gpu.stream_checker import StreamChecker, UnorderedError, checked_streams
from tests.support.scheduler.steps import decodes, said
from worker.device.device import InterpretedDevice
from worker.device.staging import StepSlot
from worker.gpu import swap
from worker.gpu.engine import GpuEngine
from worker.gpu.executor import GpuExecutor
from worker.gpu.runner import GpuRunner
from worker.gpu.swap import GpuSwapSpace
from worker.layers.kv_cache import KVCache
from worker.step.rows import PlannedSwaps, Rows

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="watches what the interpreter does")

PROMPT = [5, 6, 7, 8, 9, 10, 11]


def in_a_thread(body: Callable[[], object]) -> None:
    """Runs the body on a new thread, and raises its error here."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            body()
        except BaseException as error:  # noqa: BLE001 (raised below)
            errors.append(error)

    thread = threading.Thread(target=run, name="engine")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def test_streams_are_ordered_by_events_alone() -> None:
    """The checker itself: reads and writes of two streams, with an event between them and without."""
    with checked_streams() as checker:
        first, second = checker.new_stream(), checker.new_stream()
        x, event = torch.zeros(64), torch.cuda.Event()
        event.record()
        with checker.stream(first):
            event.wait()
            x.add_(1)
            event.record()
        with checker.stream(second):
            with pytest.raises(UnorderedError, match="stream 2 reads what stream 1 wrote"):
                x.clone()
            event.wait()
            x.clone()
        with checker.stream(first):
            # The other half is no race.
            with pytest.raises(UnorderedError, match="stream 1 writes what stream 2 reads"):
                x.zero_()
            first.wait_stream(second)
            x.zero_()


@pytest.mark.parametrize("num_in_flight", [1, 2])
def test_steps_in_flight(num_in_flight: int) -> None:
    greedy = SamplingParams(temperature=0.0)
    with checked_streams() as checker:
        run = EngineRun(device=checker.device(), max_steps_in_flight=num_in_flight)
        run.add(0, PROMPT, greedy)
        begun = [run.begin({0: len(PROMPT)})]
        for _ in range(6):
            begun.append(run.begin({0: 1}))
            if len(begun) > num_in_flight:
                begun.pop(0).take()
        for each in begun:
            each.take()
    assert run.rows[0].output == outputs_alone(PROMPT, greedy, 7)
    assert checker.num_accesses["stream 1"] > 100


def test_a_slot_that_is_filled_while_the_device_may_read_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepSlot, "clear", lambda self: self._parts.clear())
    with checked_streams() as checker:
        run = EngineRun(device=checker.device(), max_steps_in_flight=1)
        run.add(0, PROMPT, SamplingParams(temperature=0.0))
        run.begin({0: len(PROMPT)})
        run.begin({0: 1})
        with pytest.raises(UnorderedError, match="thread MainThread writes what stream 1 reads"):
            run.begin({0: 1})


def runner_of(device: InterpretedDevice, num_swap_blocks: int = 0) -> GpuRunner:
    model = small_llama(1)
    executor = GpuExecutor(model)
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
    )
    rows = Rows(
        max_num_seqs=4,
        max_model_len=32,
        block_size=8,
        num_blocks=30,
        vocab_size=VOCABULARY,
        max_num_batched_tokens=16,
        eos_token_ids=frozenset({VOCABULARY - 1}),
    )
    return GpuRunner(
        engine,
        rows,
        inference_pb2.ModelInfo(),
        swap_space=GpuSwapSpace(cache, device, num_swap_blocks),
        max_steps_in_flight=2,
        device=device,
    )


def plans(count: int = 3) -> list[step_pb2.StepPlan]:
    new = step_pb2.NewRow(
        row=0,
        sequence=1,
        token_ids=PROMPT,
        num_prompt_tokens=len(PROMPT),
        block_ids=[3, 4],
        sampling=SamplingParams(temperature=0.0),
    )
    first = step_pb2.StepPlan(step=1, new_rows=[new], rows=[0], num_tokens=[len(PROMPT)])
    return [first, *(step_pb2.StepPlan(step=2 + i, decode_rows=decodes(0)) for i in range(count))]


def test_a_worker_that_is_built_on_one_thread_computes_on_another() -> None:
    """As AsyncLLM's engine thread does: its work goes to the device's stream, too."""
    expected = [said(runner_of(InterpretedDevice()).execute(plan)).token_ids for plan in plans(0)]
    tokens: list[list[int]] = []
    with checked_streams() as checker:
        runner = runner_of(checker.device())

        def steps() -> None:
            tokens.extend(said(runner.execute(plan)).token_ids for plan in plans())
            runner.reset()

        in_a_thread(steps)
    assert tokens[:1] == expected
    assert len(tokens) == 4
    assert not checker.num_accesses["the default stream"]


def test_a_thread_that_does_not_enter_the_devices_stream_is_found() -> None:
    """torch keeps streams per thread: without `current`, steps go to the default stream, which nothing orders after the
    weights."""
    with checked_streams() as checker:
        device = checker.device()
        device.current = nullcontext  # type: ignore[method-assign]
        runner = runner_of(device)
        with pytest.raises(UnorderedError, match=r"the default stream (reads|writes) what stream 1 (wrote|reads)"):
            in_a_thread(lambda: runner.execute(plans()[0]))


class _Swaps:
    """A KV cache beside which blocks are swapped on a stream of their own."""

    def __init__(self, checker: StreamChecker, monkeypatch: pytest.MonkeyPatch) -> None:
        def block_swap(layers: list[torch.Tensor], device: object, num_blocks: int) -> BlockSwap:
            return BlockSwap(layers, [torch.zeros(num_blocks, *layer.shape[1:], dtype=layer.dtype) for layer in layers])

        monkeypatch.setattr(swap, "_swap", block_swap)
        device = checker.device()
        self._cache = fake_kv_cache()
        [self.layer] = self._cache.layers
        self.layer.zero_()
        self.space = GpuSwapSpace(self._cache, device, 4)

    def apply(self, *, out: Any = ((), ()), back: Any = ((), ()), taken: Any = ()) -> None:
        (out_blocks, out_host), (in_host, in_blocks) = (np.array(each, np.int64) for each in (out, back))
        planned = PlannedSwaps(
            out_blocks=out_blocks, out_host_blocks=out_host, in_host_blocks=in_host, in_blocks=in_blocks
        )
        self.space.apply(planned, np.array(taken, np.int64))


def test_steps_beside_swaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other blocks are written meanwhile; those that leave only once they are taken, and waited for."""
    with checked_streams() as checker:
        swaps = _Swaps(checker, monkeypatch)
        swaps.layer[1].fill_(1)
        swaps.apply(out=([1, 2], [0, 1]))
        swaps.layer[3].fill_(3)
        with pytest.raises(UnorderedError, match="stream 1 writes what stream 2 reads"):
            swaps.layer[1].fill_(5)
        swaps.apply(taken=[1])
        swaps.layer[1].fill_(5)
        swaps.apply(back=([0], [4]))
        assert swaps.layer[4].eq(1).all()
    assert checker.num_accesses["stream 2"] >= 6


def test_a_swap_in_that_no_step_waits_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with checked_streams() as checker:
        swaps = _Swaps(checker, monkeypatch)
        swaps.apply(out=([1], [0]))
        monkeypatch.setattr(torch.cuda, "Event", _Unwaited(torch.cuda.Event))
        swaps.apply(back=([0], [4]))
        with pytest.raises(UnorderedError, match="stream 1 reads what stream 2 wrote"):
            swaps.layer[4].sum()


class _Unwaited:
    def __init__(self, event: Callable[..., Any]) -> None:
        self._event = event

    def __call__(self, **how: Any) -> Any:
        event = self._event(**how)
        event.wait = lambda: None
        return event
