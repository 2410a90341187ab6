"""A beam search in this process: the router's search, with the engine's answers."""

from collections.abc import Sequence

from octavo.client.errors import ServerError
from octavo.local.desk import LocalText
from octavo.local.engine import Engine, SequenceOutput
from octavo.local.request import LocalRequest
from protos import inference_pb2 as pb
from protos.scheduler_pb2 import SequenceFinish
from router.request.pipeline import ResolvedRequest
from router.search.messages import end_ids, finish, new_search, step_sampling
from scheduler.core.messages import FinishReason


class LocalSearch(LocalRequest):
    """Asks the engine for the tokens that may come next, one step after the other."""

    def __init__(self, message: pb.GenerateRequest, resolved: ResolvedRequest, text: LocalText) -> None:
        """resolved: with a beam_search. Raises the router's InvalidRequest if a resume contradicts itself."""
        assert resolved.beam_search is not None
        eos_token_ids = resolved.model.eos_token_ids
        self._ends = end_ids(resolved.sampling, eos_token_ids)
        self._search = new_search(resolved.beam_search, resolved.sampling, eos_token_ids)
        self._answers: list[Sequence[pb.TokenLogprob]] = []
        self._num_asked = 0
        super().__init__(message, resolved, text)

    def ask(self, engine: Engine, group: int) -> None:
        """Submits a step. Raises InvalidRequest."""
        live = self._search.live
        self._answers = [() for _ in live]
        self._num_asked = len(live)
        sampling = step_sampling(self._search, self.sampling.seed)
        self._submit(engine, group, sampling, {index: beam.token_ids for index, beam in enumerate(live)})

    def follow(self, engine: Engine, group: int, index: int, output: SequenceOutput) -> bool:
        return self.take_answer(index, output)

    def cancel(self, engine: Engine, group: int) -> None:
        engine.cancel(group)
        for choice in self._choices:
            piece = choice.advance(0, (), [], SequenceFinish(reason=pb.FINISH_REASON_CANCELLED))
            if piece is not None:
                self._accept(piece)
        self._finish()

    def take_answer(self, beam: int, output: SequenceOutput) -> bool:
        """Takes the engine's output for a beam. Returns True once each beam of the step has its answer, which the
        search has taken then.

        Raises ServerError if the engine could not compute it.
        """
        if output.token_ids:
            (logprobs,) = output.logprobs
            self._answers[beam] = logprobs.top  # type: ignore[attr-defined] # opaque to the core
        if output.end is None:
            return False
        if output.end.reason is FinishReason.ERROR:
            raise ServerError(f"beam {beam} of request {self._assembly.request_id}: {output.end.message}")
        if self._search.num_steps == 0:
            self._num_cached_tokens = output.end.num_cached_tokens
        self._num_asked -= 1
        if self._num_asked:
            return False
        self._search.advance(self._answers)
        if self._search.done:
            self._deliver()
        return True

    def _deliver(self) -> None:
        for choice, (_, beam) in zip(self._choices, self._search.finished, strict=False):
            ended: SequenceFinish = finish(beam, self.sampling, self._ends, self._num_cached_tokens)
            piece = choice.advance(0, beam.token_ids, beam.logprobs(), ended)
            if piece is not None:
                self._accept(piece)
        self._finish()
