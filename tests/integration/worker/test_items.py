"""The worker's loop with items over real ZeroMQ sockets: it prepares them beside the steps, and says which it can't."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from configs import features
from protos import inference_pb2, step_pb2
from tests.fakes.fake_runner import fake_runner
from tests.fakes.step_scheduler import StepScheduler
from tests.support.models.spelled_items import PLACEHOLDER, SpelledEncoder, item_runner, to_encode
from tests.support.models.stages import make_model
from tests.support.scheduler.steps import decodes, said
from tests.support.worker_loop import RunningWorker
from worker.step.runner import StepRunner

SAMPLING = inference_pb2.SamplingParams(temperature=0.0)
WORDS = [11, 12, 13, 14]


def new_row(tokens: list[int], *items: step_pb2.RowItem) -> step_pb2.NewRow:
    return step_pb2.NewRow(
        sequence=1, token_ids=tokens, num_prompt_tokens=len(tokens), block_ids=[1, 2], sampling=SAMPLING, items=items
    )


PLAN = step_pb2.StepPlan(
    new_rows=[new_row([5, *[PLACEHOLDER] * 4, 6], step_pb2.RowItem(number=7, first_token=1, num_tokens=4))],
    rows=[0],
    num_tokens=[6],
    encoded_items=[7],
)


@pytest.fixture
def build(tmp_path: Path) -> tuple[Callable[[Callable[[float], None]], StepRunner], list[SpelledEncoder]]:
    runner, encoder = item_runner(make_model(tmp_path, "LlamaForCausalLM"), native=False)
    return lambda progress: runner, [encoder]


@pytest.fixture
def worker(build: tuple[Callable, list[SpelledEncoder]], tmp_path: Path) -> Iterator[RunningWorker]:
    running = RunningWorker(f"ipc://{tmp_path}/step.sock", build[0])
    yield running
    running.stop()


def send(scheduler: StepScheduler, message: step_pb2.ItemToEncode) -> None:
    scheduler.send(step_pb2.SchedulerToWorker(item=message))


def answer(scheduler: StepScheduler) -> tuple[int, int, str]:
    item = scheduler.expect("item")
    return item.epoch, item.number, item.error


def test_items_are_prepared_encoded_and_forgotten_with_the_epoch(
    worker: RunningWorker, build: tuple[Callable, list[SpelledEncoder]], tmp_path: Path
) -> None:
    reference, _ = item_runner(tmp_path, native=False)
    spelled = step_pb2.StepPlan(new_rows=[new_row([5, *WORDS, 6])], rows=[0], num_tokens=[6])
    decode = step_pb2.StepPlan(decode_rows=decodes(0))
    expected = [said(reference.execute(plan)).token_ids for plan in (spelled, decode)]
    with StepScheduler(worker.endpoint) as scheduler:
        ready = scheduler.join()
        assert ready.encoder_cache_size == 64
        assert features.ITEMS in ready.features
        for epoch in (1, 2):
            send(scheduler, to_encode(7, WORDS, epoch))
            assert answer(scheduler) == (epoch, 7, "")
            assert [said(scheduler.step(plan)).token_ids for plan in (PLAN, decode)] == expected
            if epoch == 1:
                scheduler.reset(2)
                # One of the last epoch may still be on its way: it gets no answer, and its number is free.
                send(scheduler, to_encode(7, [1], 1))
        assert build[1][0].num_encoded == 2
        assert worker.metrics.registry.get_sample_value("octavo_worker_encoded_items_total") == 2
        assert build[1][0].num_prepared == 2


def test_what_cannot_be_prepared_is_said_and_ends_nothing(worker: RunningWorker) -> None:
    with StepScheduler(worker.endpoint) as scheduler:
        scheduler.join()
        damaged = inference_pb2.ItemData(kind=inference_pb2.ITEM_KIND_IMAGE, files=[b"damaged"]).SerializeToString()
        send(scheduler, step_pb2.ItemToEncode(epoch=1, number=3, data=damaged, num_embeddings=1))
        assert answer(scheduler) == (1, 3, "the image is truncated")
        send(scheduler, to_encode(7, WORDS, 1))
        assert answer(scheduler) == (1, 7, "")
        assert len(said(scheduler.step(PLAN)).token_ids) == 1


def test_a_plan_that_encodes_what_is_not_prepared_ends_the_epoch(worker: RunningWorker) -> None:
    with StepScheduler(worker.endpoint) as scheduler:
        scheduler.join()
        scheduler.send_plan(PLAN)
        failure = scheduler.expect("failure")
        assert failure.message == "encoded_items: item 7 is not prepared"
        scheduler.reset(2)
        send(scheduler, to_encode(7, WORDS, 2))
        assert answer(scheduler) == (2, 7, "")


def test_a_worker_without_an_encoder_announces_none_and_refuses_items(tmp_path: Path) -> None:
    worker = RunningWorker(f"ipc://{tmp_path}/step.sock", lambda progress: fake_runner())
    try:
        with StepScheduler(worker.endpoint) as scheduler:
            ready = scheduler.join()
            assert ready.encoder_cache_size == 0
            assert features.ITEMS not in ready.features
            send(scheduler, to_encode(7, WORDS, 1))
            assert scheduler.expect("failure").message == "item: 7 comes to a rank that encodes no items"
    finally:
        worker.stop()
