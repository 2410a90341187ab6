"""Random histories of the GPU's engine: whatever shares a step, each request's output is the same as when alone."""

from dataclasses import dataclass

import numpy as np
import pytest

from protos.inference_pb2 import SamplingParams, TokenIds
from tests.fakes.fake_model import POISON
from tests.support.gpu.gpu_engine import Begun, EngineRun, EngineSequence, outputs_alone

MAX_ROWS, MAX_TOKENS, IN_FLIGHT = 5, 64, 2
# Output tokens of a request; drafts may add some more.
LENGTH, MOST = 8, 12


# So many that an output of the tokens 30 to 35 comes to one with nearly every token.
BAD_WORDS = [TokenIds(ids=ids) for ids in ((30, 31), (31, 30), (32, 32), (33, 34), (33, 30, 35), (35, 35, 30, 32))]


def kinds(seed: int) -> list[SamplingParams]:
    # The fake model fails a row that has POISON in its context.
    bias = {POISON: -100.0}
    return [
        SamplingParams(temperature=0.0, logit_bias=bias, min_tokens=3),
        SamplingParams(temperature=1.0, seed=seed, logit_bias=bias, logprobs=seed % 3),
        SamplingParams(temperature=0.0, logit_bias=bias | {30: 7.0, 31: 6.0}, frequency_penalty=0.8),
        SamplingParams(temperature=0.7, seed=seed, logit_bias=bias | {40: 5.0}, repetition_penalty=1.5),
        SamplingParams(temperature=1.0, seed=seed, allowed_token_ids=range(30, 36), bad_word_token_ids=BAD_WORDS),
    ]


@dataclass
class Request:
    prompt: list[int]
    params: SamplingParams
    # The output computed alone; longer than the request needs.
    expected: list[int]
    sequence: EngineSequence
    # A step with drafts of it is in flight, so the number of its output tokens is unknown.
    is_drafted: bool = False

    @property
    def is_done(self) -> bool:
        return len(self.sequence.output) + self.sequence.num_unknown >= LENGTH


class Walk:
    """Requests come, decode, are preempted and come back in other rows; mostly two steps are in flight."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._run = EngineRun(
            max_num_seqs=MAX_ROWS,
            max_num_batched_tokens=MAX_TOKENS,
            max_steps_in_flight=IN_FLIGHT,
            # Steps with more drafts a row are computed like prefills.
            most_drafts=2 + seed % 2,
        )
        self.live: dict[int, Request] = {}
        self._waiting: list[tuple[Request, list[int]]] = []
        self._under_way: list[tuple[Begun, list[Request]]] = []
        self.seen: set[str] = set()

    def chance(self, probability: float) -> bool:
        return bool(self._random.random() < probability)

    def submit(self, params: SamplingParams) -> None:
        prompt = self._random.integers(3, 90, self._random.integers(1, 30)).tolist()
        self._waiting.append((Request(prompt, params, outputs_alone(prompt, params, MOST), EngineSequence(prompt)), []))

    def step(self) -> bool:
        """Returns True while there is more to do."""
        while self._under_way and (len(self._under_way) == IN_FLIGHT or self.chance(0.2)):
            self._take()
        for row, request in list(self.live.items()):
            if request.is_done or (not request.sequence.num_unknown and self.chance(0.05)):
                self._leave(row, request)
        for row in self._random.permutation(MAX_ROWS).tolist():
            if row not in self.live and self._waiting:
                self._enter(row)
        self._begin()
        return bool(self.live or self._waiting)

    def finish(self) -> None:
        while self._under_way:
            self._take()

    def _begin(self) -> None:
        counts: dict[int, int] = {}
        drafts: dict[int, list[int]] = {}
        for row, request in self.live.items():
            sequence = request.sequence
            left = sequence.num_tokens - sequence.num_computed
            count = min(left, int(self._random.integers(1, 20)), MAX_TOKENS - 4 * MAX_ROWS - sum(counts.values()))
            if count < 1 or request.is_drafted or self.chance(0.2):
                continue
            counts[row] = count
            if count == left and not sequence.num_unknown and self.chance(0.3):
                known = len(sequence.output)
                right = request.expected[known : known + 3]
                drafts[row] = [token if self.chance(0.8) else 5 for token in right]
                request.is_drafted = True
                self.seen.add("drafts")
        if counts:
            self.seen.add("decodes" if set(counts.values()) == {1} and not drafts else "mixed")
            requests = [self.live[row] for row in drafts]
            self._under_way.append((self._run.begin(counts, drafts=drafts or None), requests))

    def _take(self) -> None:
        begun, drafted = self._under_way.pop(0)
        begun.take()
        for request in drafted:
            request.is_drafted = False

    def _leave(self, row: int, request: Request) -> None:
        if not request.is_done:
            self._waiting.append((request, list(request.sequence.output)))
            self.seen.add("preempted")
        self._run.free(row)
        del self.live[row]

    def _enter(self, row: int) -> None:
        request, output = self._waiting.pop(0)
        self._run.add(row, request.prompt, request.params, output)
        request.sequence = self._run.rows[row]
        self.live[row] = request


@pytest.mark.parametrize("seed", range(2))
def test_each_request_gets_what_it_gets_alone(seed: int) -> None:
    walk, requests = Walk(seed), []
    for i in range(3):
        for params in kinds(seed + i):
            walk.submit(params)
    requests = [request for request, _ in walk._waiting]
    for _ in range(500):
        if not walk.step():
            break
    walk.finish()
    assert not walk.live
    for request in requests:
        output = request.sequence.output
        assert len(output) >= LENGTH
        assert output == request.expected[: len(output)]
    assert walk.seen == {"drafts", "decodes", "mixed", "preempted"}
