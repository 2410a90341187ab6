"""The desk: turns a client's message into a resolved request, for a router and for an LLM alike.

Each feature of a request has a file in router/request/features/, with its check and its resolution. The message stays
as it came. It may be large, so nothing here keeps it or copies more of it than its sampling parameters.
"""

import time
from dataclasses import dataclass

from configs import features
from configs.sampling import MAX_LOGPROBS
from protos import inference_pb2 as pb
from router.accepted import UNTRACED, RequestTrace
from router.request.checks import checks_of_request
from router.request.features import bans, beams, constraint, fill_in, logprobs, repetition, resume, thinking
from router.request.features.items import ItemReader
from router.request.media.prompts import Prompt
from router.request.outputs import includes_reasoning
from router.request.prompts import prompt_of
from router.request.sampling import check_against_model, fill_in_defaults
from router.request.served import Model, Text
from router.request.values import check_model_name
from router.turns import finish_in_slices


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRequest:
    """A request with nothing left to a default."""

    prompt: Prompt
    sampling: pb.SamplingParams
    # The model that it was resolved for.
    model: pb.ModelInfo
    # Those that it needs of a replica (configs.features).
    features: frozenset[str]
    # Logprobs that it wants beside a token, at most.
    num_logprobs: int
    # None: tokens are drawn one after the other.
    beam_search: pb.BeamSearch | None
    # The chat's tools and their choice. None: the output is not parsed.
    parsed_chat: pb.ChatPrompt | None
    # Its deltas have the reasoning.
    include_reasoning: bool


async def resolve(
    message: pb.GenerateRequest, model: Model, text: Text, reader: ItemReader, trace: RequestTrace = UNTRACED
) -> ResolvedRequest:
    """Checks, tokenizes and resolves a request. reader: reads its images and videos. Raises RequestError.

    It suspends only where `text` and `reader` do, and to let an event loop do other work beside a large message.
    """
    check_model_name(message.model, model.name)
    given = {field.name for field, _ in message.sampling.ListFields()}
    await finish_in_slices(checks_of_request(message, given, text.outputs.form))
    info = model.info
    since = time.monotonic()
    prompt = await prompt_of(message, info, model.media_json, text, reader)
    words = message.sampling.bad_words
    bad_words = await text.encoder.encode_bad_words(words) if words else ()
    trace.tokenized(since)
    if message.HasField("resume"):
        await resume.check_tokens(message.resume, info.vocab_size)
    sampling = pb.SamplingParams()
    sampling.CopyFrom(message.sampling)
    if message.suffix and not message.HasField("resume"):
        fill_in.resolve(message, sampling, text.encoder.tokenizer)
    check_against_model(sampling, prompt.token_ids, info)
    parsed_chat = text.outputs.resolve(message, sampling, prompt.token_ids, given)
    if sampling.HasField("reasoning_marks"):
        thinking.check_against_model(sampling, info)
    fill_in_defaults(sampling, info, len(prompt.token_ids))
    if not repetition.FIELDS.isdisjoint(given):
        repetition.resolve(sampling)
    num_logprobs = 0
    if not logprobs.FIELDS.isdisjoint(given):
        num_logprobs = logprobs.resolve(sampling, info.vocab_size, model.max_logprobs)
    if not bans.FIELDS.isdisjoint(given):
        bans.resolve(sampling, bad_words, info)
    if sampling.HasField("constraint"):
        form = text.outputs.form
        canonical = await constraint.compiled(message, sampling.constraint, form, text.canonical, info)
        sampling.constraint.CopyFrom(canonical)
    search = None
    needed = features.needed_by(sampling)
    if message.HasField("beam_search"):
        search = beams.resolve(message)
        beams.check_room(search, sampling, info)
        if beams.num_needed(search, sampling, info) > MAX_LOGPROBS:
            needed |= {features.WIDE_SEARCH}
    if prompt.spans:
        needed |= {features.ITEMS}
    return ResolvedRequest(
        prompt=prompt,
        sampling=sampling,
        model=info,
        features=needed,
        num_logprobs=num_logprobs,
        beam_search=search,
        parsed_chat=parsed_chat,
        include_reasoning=includes_reasoning(message),
    )
