"""A request to the model in this process: submits what the desk has resolved, and turns tokens into a result. A beam
search is the router's, with the engine's answers."""

import asyncio
from collections.abc import Mapping, Sequence

from octavo.client.assembly import Assembly
from octavo.client.errors import InvalidRequest, ServerError
from octavo.client.results import Generation
from octavo.local.desk import LocalText, run_here
from octavo.local.engine import Engine, SequenceOutput
from protos import inference_pb2 as pb
from protos import scheduler_pb2
from protos.scheduler_pb2 import SequenceFinish
from router.accepted import fingerprint_of
from router.replicas.session import for_scheduler
from router.request.pipeline import ResolvedRequest
from router.search.messages import end_ids, finish, new_search, step_sampling
from router.streams.choices import Delta, new_choices, refold
from scheduler.core.messages import ChoiceStart, FinishReason, SequenceEnd

_WIRE_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.REPETITION: pb.FINISH_REASON_REPETITION,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
}


class LocalRequest:
    """The router's handling of a stream, without the wire: the same text, stop strings and resumes."""

    def __init__(self, message: pb.GenerateRequest, resolved: ResolvedRequest, text: LocalText) -> None:
        """message: as its client sent it. resolved: what the desk made of it. Raises the router's InvalidRequest if a
        resume contradicts itself."""
        model, sampling = resolved.model, resolved.sampling
        self.prompt_token_ids, self.sampling = resolved.prompt.token_ids, sampling
        self.items, self.files = resolved.prompt.spans, tuple(item.packed for item in resolved.prompt.items)
        self.priority, self.cache_salt = message.priority, message.cache_salt
        parsers = text.outputs.parsers(
            resolved.parsed_chat,
            self.prompt_token_ids,
            request_id=message.request_id,
            num_choices=sampling.n,
            include_reasoning=resolved.include_reasoning,
        )
        self._choices = new_choices(sampling, model.eos_token_ids, text.tokenizer, parsers)
        self._num_cached_tokens = self._num_draft_tokens = self._num_accepted_tokens = 0
        resume = message.resume if message.HasField("resume") else None
        backlog = [] if resume is None else run_here(refold(self._choices, resume, sampling, asyncio.Lock()))
        self._num_live = sum(choice.finish is None for choice in self._choices)
        fingerprint = fingerprint_of(model, resolved.features)
        if resume is not None and not self._num_live:
            # All of it was computed there.
            fingerprint = resume.fingerprint
        self._is_exact = resume is None or resume.fingerprint == fingerprint
        self._scores_prompt = resume is None or not resume.prompt_logprobs_delivered
        self._assembly = Assembly(message)
        started = pb.Started(
            request_id=message.request_id,
            seed=sampling.seed,
            prompt_token_ids=self.prompt_token_ids,
            sampling=sampling,
            fingerprint=fingerprint,
            model=model.name,
            items=self.items,
            attempt=message.resume.attempt,
        )
        self._assembly.accept(pb.GenerateResponse(started=started))
        for chunk in backlog:
            chunk.exact = self._is_exact
            self._assembly.accept(pb.GenerateResponse(chunk=chunk))
        if not self._num_live:
            self._finish()

    @property
    def request_id(self) -> str:
        return self._assembly.request_id

    @property
    def finished(self) -> bool:
        return self._assembly.finished

    def generation(self) -> Generation:
        return self._assembly.generation()

    def take_prompt_logprobs(self, frame: pb.PromptLogprobs) -> None:
        self._choices[0].fill_prompt_token_bytes(frame.logprobs)
        self._assembly.accept(pb.GenerateResponse(prompt_logprobs=frame))

    def ask(self, engine: Engine, group: int) -> None:
        """Submits the request, which has not finished, or the next step of a search, as a group of the engine's. Raises
        InvalidRequest."""
        sampling = for_scheduler(self.sampling)
        if not self._scores_prompt:
            sampling.ClearField("prompt_logprobs")
        starts = {each.index: each.token_ids for each in self._choices if each.finish is None}
        self._submit(engine, group, sampling, starts)

    def _submit(
        self, engine: Engine, group: int, sampling: pb.SamplingParams, starts: Mapping[int, Sequence[int]]
    ) -> None:
        """starts: the tokens that each choice has already. Raises InvalidRequest."""
        engine.submit(
            group,
            self.prompt_token_ids,
            sampling,
            [ChoiceStart(choice=choice, output_token_ids=tuple(ids)) for choice, ids in starts.items()],
            items=self.items,
            files=self.files,
            priority=self.priority,
            cache_salt=self.cache_salt,
        )

    def follow(self, engine: Engine, group: int, index: int, output: SequenceOutput) -> bool:
        """Takes one step's output for a sequence of its group. Returns True if the group is done: the request has
        finished, or asks again.

        Raises ServerError if the engine could not compute it, InvalidRequest if that is the request's fault.
        """
        if self.take(index, output):
            for end in engine.cancel(group, [index]):
                self.note_end(index, end)
        return self.finished

    def cancel(self, engine: Engine, group: int) -> None:
        """Ends what is left of the request."""
        for end in engine.cancel(group):
            _, index = end.key
            held = len(self._choices[index].token_ids)
            self.take(index, SequenceOutput(key=end.key, first_token=held, end=end))

    def take(self, index: int, output: SequenceOutput) -> bool:
        """Takes one step's output for a choice. Returns True if a stop string ended it: the caller then cancels it in
        the engine and passes its end to `note_end`.

        Raises ServerError if the engine could not compute it, InvalidRequest if that is the request's fault.
        """
        end, ended = output.end, None
        if end is not None and end.reason is FinishReason.ERROR and end.is_invalid:
            raise InvalidRequest(f"request {self._assembly.request_id}: {end.message}")
        if end is not None and end.reason is FinishReason.ERROR:
            raise ServerError(f"choice {index} of request {self._assembly.request_id}: {end.message}")
        if end is not None:
            ended = scheduler_pb2.SequenceFinish(reason=_WIRE_REASONS[end.reason], stop_token_id=end.stop_token_id)
        choice = self._choices[index]
        logprobs: list[pb.TokenLogprobs] = list(output.logprobs)  # type: ignore[arg-type] # opaque to the core
        piece = choice.advance(output.first_token, output.token_ids, logprobs, ended)
        if piece is not None:
            self._accept(piece)
        if end is not None:
            self.note_end(index, end)
        return choice.finish is not None and end is None

    def note_end(self, index: int, end: SequenceEnd) -> None:
        """Notes that the engine has ended a choice."""
        if index == 0:
            self._num_cached_tokens = end.num_cached_tokens
        self._num_draft_tokens += end.num_draft_tokens
        self._num_accepted_tokens += end.num_accepted_tokens
        self._num_live -= 1
        if not self._num_live:
            self._finish()

    def _finish(self) -> None:
        usage = pb.Usage(
            prompt_tokens=len(self.prompt_token_ids),
            cached_tokens=self._num_cached_tokens,
            completion_tokens=sum(len(each.token_ids) for each in self._choices),
            reasoning_tokens=sum(each.num_reasoning_tokens for each in self._choices),
            draft_tokens=self._num_draft_tokens,
            accepted_draft_tokens=self._num_accepted_tokens,
        )
        self._assembly.accept(pb.GenerateResponse(finished=pb.Finished(usage=usage)))

    def _accept(self, piece: Delta) -> None:
        piece.exact = self._is_exact
        self._assembly.accept(piece.message())


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
