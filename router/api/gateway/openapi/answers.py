"""Models of answers, for the document alone: answers are dictionaries, encoded piece by piece. Tests hold them against
these."""

from typing import Any, Literal

from pydantic import Field, create_model


def sometimes(kind: Any, description: str | None = None) -> Any:
    """Returns a field that not every answer has."""
    return kind, Field(default_factory=dict, description=description)


def several(kind: Any) -> Any:
    return list[kind]


_FINISH_REASON = Literal["stop", "length", "tool_calls", "repetition"] | None
_STOPPED = "The string or token id that ended the output; null for the model's own end token."
_IDS = sometimes(list[int], "With return_token_ids.")
_PROMPT_TEXT = sometimes(str, "With return_prompt_text.")
_PROMPT_LOGPROBS = sometimes(
    list[dict[str, Any] | None],
    "With prompt_logprobs: for each token of the prompt, {token id: {logprob, rank, decoded_token}}.",
)
_DETAILS = "reasoning_tokens of parsed outputs; accepted_ and rejected_prediction_tokens with speculation."
_ARGUMENTS = "name, and arguments: the text of a JSON object."

Usage = create_model(
    "Usage",
    prompt_tokens=int,
    completion_tokens=int,
    total_tokens=int,
    prompt_tokens_details=sometimes(dict[str, int], "cached_tokens"),
    completion_tokens_details=sometimes(dict[str, int], _DETAILS),
)
Call = create_model(
    "Call",
    # In a stream, a call's first piece has id, type and name, and all have its index.
    id=sometimes(str),
    type=sometimes(Literal["function"]),
    index=sometimes(int),
    function=(dict[str, str], Field(description=_ARGUMENTS)),
)
Said = create_model(
    "Said",
    role=sometimes(str),
    content=sometimes(str | None),
    reasoning=sometimes(str),
    reasoning_content=sometimes(str, "The same as reasoning."),
    tool_calls=sometimes(several(Call)),
    refusal=sometimes(str | None),
)
Choice = create_model(
    "Choice",
    index=int,
    logprobs=(dict[str, Any] | None, Field(description="With logprobs, in OpenAI's shape.")),
    finish_reason=_FINISH_REASON,
    stop_reason=sometimes(str | int | None, _STOPPED),
    token_ids=_IDS,
)
TextChoice = create_model(
    "TextChoice", __base__=Choice, text=str, prompt_token_ids=_IDS, prompt_logprobs=_PROMPT_LOGPROBS
)
ChatChoice = create_model("ChatChoice", __base__=Choice, message=Said)
ChunkChoice = create_model("ChunkChoice", __base__=Choice, delta=Said)
Answer = create_model("Answer", id=str, created=int, model=str)
Completion = create_model(
    "Completion",
    __base__=Answer,
    object=Literal["text_completion"],
    choices=several(TextChoice),
    usage=sometimes(Usage),
)
ChatCompletion = create_model(
    "ChatCompletion",
    __base__=Answer,
    object=Literal["chat.completion"],
    choices=several(ChatChoice),
    usage=Usage,
    prompt_token_ids=_IDS,
    prompt_text=_PROMPT_TEXT,
    prompt_logprobs=_PROMPT_LOGPROBS,
)
ChatCompletionChunk = create_model(
    "ChatCompletionChunk",
    __base__=Answer,
    object=Literal["chat.completion.chunk"],
    choices=several(ChunkChoice),
    usage=sometimes(Usage),
    prompt_token_ids=_IDS,
    prompt_text=_PROMPT_TEXT,
)
AnthropicUsage = create_model(
    "AnthropicUsage", input_tokens=int, cache_creation_input_tokens=int, cache_read_input_tokens=int, output_tokens=int
)
ContentBlock = create_model(
    "ContentBlock",
    type=Literal["text", "thinking", "tool_use"],
    text=sometimes(str),
    thinking=sometimes(str),
    id=sometimes(str),
    name=sometimes(str),
    input=sometimes(dict[str, Any]),
)
AnthropicMessage = create_model(
    "AnthropicMessage",
    id=str,
    type=Literal["message"],
    role=Literal["assistant"],
    model=str,
    content=several(ContentBlock),
    stop_reason=Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None,
    stop_sequence=str | None,
    usage=AnthropicUsage,
)
TypedEvent = create_model("TypedEvent", type=str)
OutputPart = create_model("OutputPart", type=Literal["output_text", "reasoning_text"], text=str)
OutputItem = create_model(
    "OutputItem",
    id=str,
    type=Literal["message", "reasoning", "function_call"],
    status=str,
    role=sometimes(str),
    content=sometimes(several(OutputPart)),
    call_id=sometimes(str),
    name=sometimes(str),
    arguments=sometimes(str),
)
Response = create_model(
    "Response",
    id=str,
    object=Literal["response"],
    created_at=int,
    model=str,
    status=Literal["in_progress", "completed", "incomplete", "failed"],
    output=several(OutputItem),
    usage=dict[str, Any] | None,
    previous_response_id=str | None,
    store=bool,
)
File = create_model(
    "File", id=str, object=Literal["file"], bytes=int, created_at=int, filename=str, purpose=str, status=str
)
Files = create_model("Files", data=several(File), has_more=bool)
Batch = create_model(
    "Batch",
    id=str,
    object=Literal["batch"],
    endpoint=str,
    status=str,
    input_file_id=str,
    output_file_id=str | None,
    error_file_id=str | None,
    created_at=int,
    expires_at=int,
    request_counts=create_model("RequestCounts", total=int, completed=int, failed=int),
    errors=dict[str, Any] | None,
    metadata=dict[str, str] | None,
)
Batches = create_model("Batches", data=several(Batch), has_more=bool)
Model = create_model("Model", id=str, object=Literal["model"], created=int, owned_by=str, max_model_len=int)
Models = create_model("Models", object=Literal["list"], data=several(Model))
Deleted = create_model("Deleted", id=str, object=str, deleted=bool)
Tokens = create_model("Tokens", count=int, max_model_len=int, tokens=list[int], token_strs=sometimes(list[str]))
Problem = create_model("Problem", message=str, type=str, param=str | None, code=str | None)
Error = create_model("Error", error=Problem)
AnthropicProblem = create_model("AnthropicProblem", type=str, message=str)
AnthropicError = create_model("AnthropicError", type=Literal["error"], error=AnthropicProblem)
