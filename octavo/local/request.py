"""A request to the model in this process: turns the user's input into token ids, and tokens into a result."""

from collections.abc import Callable
from dataclasses import dataclass

from octavo.client.assembly import Assembly
from octavo.client.errors import InvalidRequest, ServerError
from octavo.client.results import Generation
from octavo.local.engine import Engine, SequenceOutput
from protos import inference_pb2 as pb
from protos import scheduler_pb2
from router.errors import RequestError
from router.intake import validation
from router.intake.bans import ban, check_bans
from router.intake.constraints import check_constraint
from router.intake.media.items import read_here
from router.intake.media.limits import MediaLimits
from router.intake.media.prompts import Prompt, expanded
from router.intake.outputs import Outputs, includes_reasoning
from router.intake.thinking import check_enforced
from router.intake.validation import resolve_logprobs, resolve_sampling
from router.replicas.session import for_scheduler
from router.streams.choices import new_choices
from router.text.chat_template import TemplateError
from router.text.tokenizer import Tokenizer
from runtime.media.recipes.recipe import Recipe
from scheduler.core.messages import FinishReason, SequenceEnd

_WIRE_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.REPETITION: pb.FINISH_REASON_REPETITION,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
}


# Returns the canonical form of a constraint. Raises RequestError.
Canonical = Callable[[pb.Constraint], pb.Constraint]


@dataclass(frozen=True, slots=True)
class LocalMedia:
    """How a model's images and videos become tokens, and their bounds. recipe: None: it takes none."""

    recipe: Recipe | None
    limits: MediaLimits


class LocalRequest:
    """The router's handling of a stream, without the wire: the same checks, defaults, text and stop strings."""

    def __init__(
        self,
        message: pb.GenerateRequest,
        model: pb.ModelInfo,
        tokenizer: Tokenizer,
        *,
        max_logprobs: int,
        canonical: Canonical,
        outputs: Outputs,
        media: LocalMedia,
    ) -> None:
        """max_logprobs: the option. outputs: the model's formats. Raises InvalidRequest."""
        try:
            validation.check_request(message)
            check_bans(message.sampling)
            check_constraint(message)
            prompt = _prompt(message, tokenizer, media)
            self.prompt_token_ids = prompt.token_ids
            self.items, self.files = prompt.spans, tuple(item.packed for item in prompt.items)
            validation.check_against_model(self.prompt_token_ids, message.sampling, model)
            parsed_chat = outputs.resolve(message, self.prompt_token_ids)
            check_enforced(message.sampling, model)
            self.sampling = resolve_sampling(
                message.sampling,
                model.default_sampling,
                num_prompt_tokens=len(self.prompt_token_ids),
                max_model_len=model.max_model_len,
            )
            resolve_logprobs(self.sampling, model.vocab_size, max_logprobs)
            ban(self.sampling, tokenizer.encode_bad_words(message.sampling.bad_words), model)
            if self.sampling.HasField("constraint"):
                self.sampling.constraint.CopyFrom(canonical(self.sampling.constraint))
        except (RequestError, TemplateError) as error:
            raise InvalidRequest(str(error)) from None
        parsers = outputs.parsers(
            parsed_chat,
            self.prompt_token_ids,
            request_id=message.request_id,
            num_choices=self.sampling.n,
            include_reasoning=includes_reasoning(message),
        )
        self._choices = new_choices(self.sampling, model.eos_token_ids, tokenizer, parsers)
        self._num_live = len(self._choices)
        self._num_cached_tokens = self._num_draft_tokens = self._num_accepted_tokens = 0
        self._assembly = Assembly(message)
        started = pb.Started(
            request_id=message.request_id,
            seed=self.sampling.seed,
            prompt_token_ids=self.prompt_token_ids,
            sampling=self.sampling,
            fingerprint=model.fingerprint,
            model=model.name,
            items=self.items,
        )
        self._assembly.accept(pb.GenerateResponse(started=started))

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
        """Submits the request, or the next step of a search, as a group of the engine's. Raises InvalidRequest."""
        engine.submit(group, self.prompt_token_ids, for_scheduler(self.sampling), items=self.items, files=self.files)

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
            self._assembly.accept(piece.message())
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


def _prompt(message: pb.GenerateRequest, tokenizer: Tokenizer, media: LocalMedia) -> Prompt:
    """Returns the prompt with its items. Raises RequestError or TemplateError."""
    items = read_here(message, media.recipe, media.limits)
    token_ids = _encode(message, tokenizer)
    if media.recipe is None:
        return Prompt(token_ids)
    source = "the rendered chat" if message.HasField("chat") else "the prompt"
    return expanded(token_ids, items, media.recipe, source=source)


def _encode(message: pb.GenerateRequest, tokenizer: Tokenizer) -> list[int]:
    """The prompt's token ids. Raises RequestError or TemplateError."""
    match message.WhichOneof("input"):
        case "chat":
            validation.check_chat(message.chat)
            return tokenizer.encode_chat(message.chat)
        case "prompt":
            return tokenizer.encode(message.prompt)
    return list(message.token_ids.ids)
