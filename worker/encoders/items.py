"""The parts by which a first-stage rank encodes items: the encoder, their inputs, and the cache of their embeddings."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from protos import step_pb2
from protos.inference_pb2 import ITEM_KIND_IMAGE
from runtime.media.recipes.recipe import ItemSize, Layout
from worker.encoders.cache import EncoderCache
from worker.encoders.encoder import Encoder
from worker.encoders.preparation import Preparations
from worker.errors import PlanError
from worker.step.items import EmbeddedTokens

# The sides of the image in pixels. An encoder that makes more of one so small would take seconds at the start on a CPU.
_WARM_UP_SIDE, _MOST_WARM_UP_EMBEDDINGS = 56, 256


class Items:
    """Plans say which items are encoded, and whose embeddings are dropped."""

    def __init__(
        self,
        encoder: Encoder,
        cache: EncoderCache,
        *,
        most_input_bytes: int,
        guard: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """most_input_bytes: see Preparations. guard: entered around the encoder's work; explains a lack of memory."""
        self.encoder, self.cache, self._guard = encoder, cache, guard
        self.preparations = Preparations(encoder, most_bytes=most_input_bytes)
        # Seconds that encoding took since they were last taken.
        self._seconds = 0.0

    @property
    def cache_size(self) -> int:
        """See worker.step.runner.PreparesItems."""
        return self.cache.size

    def prepare(self, message: step_pb2.ItemToEncode, when_done: Callable[[], None]) -> None:
        """See worker.step.runner.PreparesItems."""
        self.preparations.begin(message, when_done)

    def take_seconds(self) -> float:
        """See worker.step.runner.PreparesItems."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    @property
    def num_input_bytes(self) -> int:
        """See worker.step.runner.PreparesItems."""
        return self.preparations.num_bytes

    def take_done(self) -> list[tuple[int, str]]:
        """See worker.step.runner.PreparesItems."""
        return self.preparations.take_done()

    def warm_up(self, most_tokens: int) -> Layout | None:
        """Encodes a small image, whose number is 0, so that its work is compiled and allocated for the first request.
        Returns the tokens that stand for it; None: the model makes too much of every image."""
        size = ItemSize(kind=ITEM_KIND_IMAGE, width=_WARM_UP_SIDE, height=_WARM_UP_SIDE)
        try:
            layout = self.encoder.recipe.layout(size)
        except ValueError:
            return None
        if (
            layout.num_embeddings > min(_MOST_WARM_UP_EMBEDDINGS, self.cache.size)
            or len(layout.token_ids) > most_tokens
        ):
            return None
        with torch.inference_mode():
            self.cache.put(0, self.encoder.encode(self.encoder.dummy(size)))
        return layout

    def apply(self, plan: step_pb2.StepPlan) -> None:
        """Drops and forgets a plan's items, then encodes those that it names. Raises PlanError."""
        for number in plan.dropped_items:
            self.cache.drop(number)
        for number in plan.forgotten_items:
            self.preparations.forget(number)
        if plan.encoded_items:
            start = time.perf_counter()
            for number in plan.encoded_items:
                self._encode(number)
            self._seconds += time.perf_counter() - start

    def embeddings(self, tokens: EmbeddedTokens) -> torch.Tensor:
        """Returns the embeddings [M, E] of the tokens, in their order. Raises PlanError."""
        return self.cache.take(tokens.parts)

    def reset(self) -> None:
        """Starts a new epoch: forgets every item."""
        self.preparations.clear()
        self.cache.clear()

    def _encode(self, number: int) -> None:
        if number in self.cache:
            raise PlanError(f"encoded_items: item {number} is encoded already; drop it first")
        prepared = self.preparations.input_of(number)
        with self._guard(), torch.inference_mode():
            self.cache.put(number, self.encoder.encode(prepared))


def check_no_items(plan: step_pb2.StepPlan) -> None:
    """Raises PlanError if a plan encodes items, for ranks without an encoder that compute the first stage."""
    if plan.encoded_items:
        raise PlanError(f"encoded_items: {plan.encoded_items[0]}, but this rank has no encoder")
