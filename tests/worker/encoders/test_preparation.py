"""Inputs of encoders are made beside the steps, within a bound of memory; one that can't be made ends no other."""

import threading
from typing import Any

import pytest
import torch

from protos import inference_pb2 as pb
from protos import step_pb2
from runtime.media.names import serialized
from tests.support.models.spelled_items import SpelledEncoder, SpelledInput, to_encode
from tests.support.models.vision_models import file_of, picture
from worker.encoders.cache import EncoderCache
from worker.encoders.pixels import Frames
from worker.encoders.preparation import Preparations
from worker.errors import PlanError

TABLE_VE = torch.arange(100.0)[:, None].expand(-1, 4)


class Gate(SpelledEncoder):
    """Waits in each preparation until it may go on."""

    def __init__(self) -> None:
        super().__init__(TABLE_VE)
        self.entered, self.may_go = threading.Semaphore(0), threading.Semaphore(0)

    def prepare(self, data: pb.ItemData) -> SpelledInput:
        self.entered.release()
        assert self.may_go.acquire(timeout=30)
        if data.files[0] == b"1 2 3 4":
            raise MemoryError("no memory for pixels")
        return super().prepare(data)


def begun(preparations: Preparations, *messages: step_pb2.ItemToEncode) -> threading.Semaphore:
    done = threading.Semaphore(0)
    for message in messages:
        preparations.begin(message, done.release)
    return done


def wait(done: threading.Semaphore, count: int) -> None:
    for _ in range(count):
        assert done.acquire(timeout=30)


def token_ids(prepared: Any) -> list[int]:
    return list(prepared.token_ids)


def test_errors_are_for_the_client_of_that_item_alone() -> None:
    gate = Gate()
    preparations = Preparations(gate, most_bytes=1000)
    gate.may_go.release(6)
    damaged = serialized(pb.ItemData(kind=pb.ITEM_KIND_IMAGE, files=[b"damaged"]))
    wrong = to_encode(5, [7, 8])
    wrong.num_embeddings = 3
    messages = [
        to_encode(1, [7]),
        step_pb2.ItemToEncode(number=2, data=damaged),
        to_encode(3, [1, 2, 3, 4]),
        step_pb2.ItemToEncode(number=4, data=b"\xff\xff"),
        wrong,
        to_encode(6, [9, 9]),
    ]
    wait(begun(preparations, *messages), 6)
    answers = preparations.take_done()
    assert [number for number, _ in answers] == [1, 2, 3, 4, 5, 6]
    errors = [error for _, error in answers]
    assert errors[0] == errors[5] == ""
    assert errors[1] == "the image is truncated"
    assert errors[2] == "the item can't be prepared: MemoryError: no memory for pixels"
    assert errors[3] == "2 bytes of an item are not an ItemData"
    assert errors[4].startswith("the item has 2 embeddings, and the router has counted 3")
    assert preparations.take_done() == []
    assert token_ids(preparations.input_of(6)) == [9, 9]
    with pytest.raises(PlanError, match="item 2 is not prepared"):
        preparations.input_of(2)


def test_an_image_with_two_sizes_ends_its_own_request_alone() -> None:
    """Files as the worker gets them from any router: nothing of the first one is decoded, the second one is."""

    class Decoding(SpelledEncoder):
        def prepare(self, data: pb.ItemData) -> SpelledInput:
            frames = Frames(data)
            return SpelledInput([1] * frames.resized((frames.height, frames.width), 3).numel())

    whole, other = file_of(picture(4, 2)), file_of(picture(40, 30))
    messages = [
        step_pb2.ItemToEncode(
            number=number, data=serialized(pb.ItemData(kind=pb.ITEM_KIND_IMAGE, files=[file])), num_embeddings=24
        )
        for number, file in ((1, whole[:33] + other[8:]), (2, whole))
    ]
    preparations = Preparations(Decoding(TABLE_VE), most_bytes=1000)
    wait(begun(preparations, *messages), 2)
    (first, error), second = preparations.take_done()
    assert (first, second) == (1, (2, ""))
    assert "it has 2 whole IHDR chunks" in error
    with pytest.raises(PlanError, match="item 1 is not prepared"):
        preparations.input_of(1)


def test_what_was_forgotten_meanwhile_gives_no_answer() -> None:
    gate = Gate()
    preparations = Preparations(gate, most_bytes=1000)
    done = begun(preparations, to_encode(1, [1]), to_encode(2, [2]), to_encode(3, [3]))
    wait(gate.entered, 1)
    preparations.forget(1)
    preparations.forget(2)
    gate.may_go.release(3)
    wait(done, 1)
    assert preparations.take_done() == [(3, "")]
    # The second one was never begun.
    assert gate.num_prepared == 2


def test_an_item_of_the_last_epoch_is_not_taken_for_one_of_this() -> None:
    gate = Gate()
    preparations = Preparations(gate, most_bytes=1000)
    begun(preparations, to_encode(1, [1]))
    wait(gate.entered, 1)
    preparations.clear()
    done = begun(preparations, to_encode(1, [2, 2]))
    gate.may_go.release(2)
    wait(done, 1)
    assert preparations.take_done() == [(1, "")]
    assert token_ids(preparations.input_of(1)) == [2, 2]


def test_a_forgotten_item_may_come_again_before_its_plan_is_computed() -> None:
    """Plans are computed later than messages arrive: an input is encoded, then forgotten, then there is another."""
    preparations = Preparations(SpelledEncoder(TABLE_VE), most_bytes=1000)
    wait(begun(preparations, to_encode(1, [1]), to_encode(1, [1])), 2)
    assert preparations.take_done() == [(1, ""), (1, "")]
    for _ in range(2):
        assert token_ids(preparations.input_of(1)) == [1]
        preparations.forget(1)
    assert preparations.num_bytes == 0
    with pytest.raises(PlanError, match="item 1 is not prepared"):
        preparations.input_of(1)
    preparations.forget(1)


def test_inputs_beyond_the_bound_are_made_again() -> None:
    """Each takes 8 bytes a token. The newest is always kept."""
    encoder = SpelledEncoder(TABLE_VE)
    preparations = Preparations(encoder, most_bytes=50)
    wait(begun(preparations, *(to_encode(number, [number] * 3) for number in (1, 2, 3, 4))), 4)
    assert preparations.num_bytes == 48
    assert encoder.num_prepared == 4
    # Used again, so the other one goes first.
    assert token_ids(preparations.input_of(3)) == [3, 3, 3]
    assert encoder.num_prepared == 4
    assert token_ids(preparations.input_of(1)) == [1, 1, 1]
    assert token_ids(preparations.input_of(3)) == [3, 3, 3]
    assert encoder.num_prepared == 5
    assert token_ids(preparations.input_of(4)) == [4, 4, 4]
    assert encoder.num_prepared == 6
    wait(begun(preparations, to_encode(5, [5] * 9)), 1)
    assert preparations.num_bytes == 72
    preparations.forget(5)
    assert preparations.num_bytes == 0
    assert token_ids(preparations.input_of(2)) == [2, 2, 2]


def test_the_cache_gives_out_each_place_once() -> None:
    """Items of many sizes come and go; each one's embeddings stay what they were, wherever they lie."""
    cache = EncoderCache(40, 4, torch.float32, torch.device("cpu"))
    held: dict[int, int] = {}
    generator = torch.Generator().manual_seed(3)
    for item in range(200):
        count = int(torch.randint(1, 12, (), generator=generator))
        while held and cache.num_embeddings + count > 40:
            oldest = next(iter(held))
            cache.drop(oldest)
            del held[oldest]
        rows_ME = item * 100 + torch.arange(4.0 * count).view(count, 4)
        cache.put(item, rows_ME)
        held[item] = count
        assert cache.num_embeddings == sum(held.values())
        for number, size in held.items():
            expected = number * 100 + torch.arange(4.0 * size).view(size, 4)
            assert torch.equal(cache.take([(number, 0, size)]), expected)
            assert torch.equal(cache.take([(number, size - 1, size), (number, 0, 1)]), expected[[-1, 0]])
    cache.clear()
    assert cache.num_embeddings == 0
    with pytest.raises(PlanError, match="item 7 has 41 embeddings, and 40 of encoder_cache_size=40 are free"):
        cache.put(7, torch.zeros(41, 4))
