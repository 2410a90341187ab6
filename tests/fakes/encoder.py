"""An encoder without weights: an item's embeddings are its name. It checks every promise about items of step.proto."""

import threading
from collections.abc import Callable

from protos import inference_pb2, step_pb2
from runtime.media.names import item_name

# An item with this file can't be decoded.
BAD_FILE = b"not an image"


class FakeItems:
    """The parts of a rank that encodes: worker.step.runner.PreparesItems, and the cache."""

    def __init__(self, cache_size: int, max_num_encoder_input_tokens: int = 0) -> None:
        self.cache_size, self._budget = cache_size, max_num_encoder_input_tokens
        # Set: items are prepared at once. Otherwise when it is set.
        self.may_prepare = threading.Event()
        self.may_prepare.set()
        # How often items were sent, and encoded, over all epochs.
        self.num_received = self.num_encoded = 0
        self.reset()

    def reset(self) -> None:
        # By number: names and sizes.
        self._inputs: dict[int, tuple[bytes, int]] = {}
        self._embeddings: dict[int, tuple[bytes, int]] = {}
        self._name_of: dict[int, bytes] = {}
        self._done: list[tuple[int, str]] = []

    def prepare(self, message: step_pb2.ItemToEncode, when_done: Callable[[], None]) -> None:
        assert message.number not in self._inputs, f"item {message.number} is sent again, without being forgotten"
        name, data = item_name(message.data), inference_pb2.ItemData.FromString(message.data)
        assert self._name_of.setdefault(message.number, name) == name, "a number names two items"
        self.num_received += 1
        error = ""
        if BAD_FILE in data.files:
            error = "items[0]: the file can't be decoded: give a PNG"
        else:
            self._inputs[message.number] = name, message.num_embeddings

        def run() -> None:
            self.may_prepare.wait()
            self._done.append((message.number, error))
            when_done()

        if self.may_prepare.is_set():
            run()
        else:
            threading.Thread(target=run, daemon=True).start()

    @property
    def num_input_bytes(self) -> int:
        return 0

    def take_seconds(self) -> float:
        return 0.0

    def take_done(self) -> list[tuple[int, str]]:
        done, self._done = self._done, []
        return done

    def apply(self, plan: step_pb2.StepPlan) -> None:
        for number in plan.dropped_items:
            assert self._embeddings.pop(number, None), f"dropped_items: {number} has no embeddings"
        for number in plan.forgotten_items:
            assert self._inputs.pop(number, None), f"forgotten_items: {number} has no input"
        for number in plan.encoded_items:
            assert number not in self._embeddings, f"encoded_items: {number} is encoded already"
            assert number in self._inputs, f"encoded_items: {number} is not prepared"
            self._embeddings[number] = self._inputs[number]
        self.num_encoded += len(plan.encoded_items)
        size = sum(size for _, size in self._embeddings.values())
        assert size <= self.cache_size, f"encoded_items: {size} embeddings in a cache of {self.cache_size}"

    def name_of(self, number: int) -> bytes | None:
        """The item's name; None if it was never sent."""
        return self._name_of.get(number)

    def embeddings(self, number: int) -> bytes:
        """The embeddings that a step with the item's tokens reads."""
        assert number in self._embeddings, f"rows: item {number} is computed without its embeddings"
        return self._embeddings[number][0]
