"""The constraint of an output: the client's own, or the one that makes calls follow a chat's tools."""

import time
from collections.abc import Awaitable, Callable

from protos.inference_pb2 import Constraint, GenerateRequest, ModelInfo, SamplingParams
from router.errors import InvalidConstraint, InvalidRequest, InvalidTools
from router.parsing.grammar import UnenforceableError, enforced_schemas, is_json_answer, tool_constraint
from router.parsing.parser import OutputFormat
from runtime.grammar.engine import MAX_TEXT_BYTES

# Returns the canonical form of a constraint. Raises InvalidConstraint, and MissingFeature if none can be compiled here.
Canonical = Callable[[Constraint, ModelInfo], Awaitable[Constraint]]

FIELDS = frozenset({"constraint"})

# A larger message has a text that is too large, however it is divided.
_MOST_BYTES = 2 * MAX_TEXT_BYTES
# Where the answer begins in harmony.
_HARMONY_ANSWER = "<|channel|>final<|message|>"
# The schemas of a chat's tools are tried for so long. All together have as many bytes as one constraint may.
_MOST_TOOL_SECONDS = 2.0


def check(message: GenerateRequest) -> None:
    """Checks all that can be checked without the model. Raises InvalidConstraint."""
    sampling = message.sampling
    kind = sampling.constraint.WhichOneof("kind")
    if kind is None:
        raise InvalidConstraint(
            "it has no kind: set json_schema, json_object, regex, choice, grammar or structural_tag"
        )
    if (size := sampling.constraint.ByteSize()) > _MOST_BYTES:
        raise InvalidConstraint(f"it has {size} bytes: use at most {MAX_TEXT_BYTES}", kind)
    if sampling.ignore_eos:
        raise InvalidConstraint("it does not go with ignore_eos, because a complete output ends: use one of them")
    if message.HasField("beam_search"):
        raise InvalidConstraint("it does not go with beam_search: use one of them")


def resolve(
    message: GenerateRequest, sampling: SamplingParams, form: OutputFormat, prompt_end: Callable[[], str]
) -> None:
    """Sets the constraint that makes calls follow the chat's tools, and where a client's own one begins in a parsed
    output. A resume brings both.

    sampling: changed in place. form: the served model's. prompt_end: returns the text of the prompt's last tokens.
    Raises InvalidRequest.
    """
    own = sampling.constraint if sampling.HasField("constraint") else None
    is_answers = own is not None and message.parse_output and is_json_answer(own)
    constraint = None
    if message.chat.tools:
        try:
            constraint = tool_constraint(form.calls, message.chat, own if is_answers else None)
        except UnenforceableError as error:
            raise InvalidTools(str(error)) from None
    if constraint is not None:
        others = "chat.tool_choice or a strict tool says what the output must be"
        if own is not None and not is_answers:
            raise InvalidConstraint(f"it is set, and {others}: use one, or JSON in a parsed output, without `after`")
        for name, is_set in (
            ("sampling.ignore_eos", sampling.ignore_eos),
            ("beam_search", message.HasField("beam_search")),
        ):
            if is_set:
                raise InvalidRequest(f"{name} is set, and {others}: use one")
        sampling.constraint.CopyFrom(constraint)
    elif own is None or not (message.parse_output or sampling.HasField("thinking_token_budget")):
        return
    if sampling.constraint.after:
        return
    if form.reasoning is not None:
        sampling.constraint.after = form.reasoning.grammar_after(prompt_end())
    elif constraint is None and form.is_harmony:
        sampling.constraint.after = _HARMONY_ANSWER


async def compiled(
    message: GenerateRequest, constraint: Constraint, form: OutputFormat, canonical: Canonical, model: ModelInfo
) -> Constraint:
    """Returns the canonical form of a resolved constraint, of which the client's own one, in the message, may be a
    part. Raises InvalidConstraint, InvalidTools, MissingFeature."""
    try:
        return await canonical(constraint, model)
    except InvalidConstraint as error:
        # A resume brings it, whatever it was made from.
        schemas = {} if message.HasField("resume") else enforced_schemas(form.calls, message.chat)
        own = message.sampling.constraint
        if own.WhichOneof("kind") not in (None, constraint.WhichOneof("kind")):
            await canonical(own, model)
        if not schemas:
            raise
        raise await _wrong_tool(canonical, schemas, model, error) from None


async def _wrong_tool(
    canonical: Canonical, schemas: dict[int, str], model: ModelInfo, error: InvalidConstraint
) -> InvalidTools:
    """Finds the tool whose schema keeps a chat's calls from being constrained.

    schemas: by the places of their tools (parsing.grammar.enforced_schemas). error: of the constraint made of them.
    """
    until = time.monotonic() + _MOST_TOOL_SECONDS
    for index, schema in schemas.items():
        try:
            await canonical(Constraint(json_schema=schema), model)
        except InvalidConstraint as wrong:
            return InvalidTools(wrong.problem, index)
        if time.monotonic() > until:
            break
    return InvalidTools(f"no output can be made to follow them: {error.problem}")
