"""Schemas of answers, which are made as dictionaries and have no models."""

from typing import Any

TEXT, INTEGER, NUMBER, FLAG = ({"type": kind} for kind in ("string", "integer", "number", "boolean"))
MAYBE_TEXT = {"type": "string", "nullable": True}
ANYTHING: dict[str, Any] = {}
_TOKEN_IDS = {"type": "array", "items": INTEGER, "description": "With return_token_ids."}
_STOP_REASON = {
    "anyOf": [MAYBE_TEXT, INTEGER],
    "description": "The string or token id that ended the output; null for the model's own end token.",
}
_FINISH_REASON = {**MAYBE_TEXT, "enum": ["stop", "length", None]}
_LOGPROBS = {"type": "object", "nullable": True, "description": "With logprobs, in OpenAI's shape."}
_PROMPT_LOGPROBS = {
    "type": "array",
    "items": {"type": "object", "nullable": True},
    "description": "With prompt_logprobs: for each token of the prompt, {token id: {logprob, rank, decoded_token}}.",
}


def ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def several(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def record(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    """An object with these fields."""
    names = {"required": [*required]} if required else {}
    return {"type": "object", **names, "properties": {**required, **optional}}


def _is(text: str) -> dict[str, Any]:
    return {"type": "string", "enum": [text]}


_USAGE = record(
    {"prompt_tokens": INTEGER, "completion_tokens": INTEGER, "total_tokens": INTEGER},
    prompt_tokens_details=record({"cached_tokens": INTEGER}),
    completion_tokens_details=record(
        {}, reasoning_tokens=INTEGER, accepted_prediction_tokens=INTEGER, rejected_prediction_tokens=INTEGER
    ),
)
_OF_ANSWER = {"id": TEXT, "created": INTEGER, "model": TEXT}
_OF_PROMPT = {"prompt_token_ids": _TOKEN_IDS, "prompt_text": TEXT}
_CHOICE = {"index": INTEGER, "logprobs": _LOGPROBS, "finish_reason": _FINISH_REASON}
_MORE = {"stop_reason": _STOP_REASON, "token_ids": _TOKEN_IDS}
_SAID = record({"role": TEXT, "content": TEXT}, refusal=MAYBE_TEXT)

ANSWERS: dict[str, Any] = {
    "Usage": _USAGE,
    "Completion": record(
        {
            **_OF_ANSWER,
            "object": _is("text_completion"),
            "choices": several(
                record(
                    {**_CHOICE, "text": TEXT},
                    **_MORE,
                    prompt_token_ids=_TOKEN_IDS,
                    prompt_logprobs=_PROMPT_LOGPROBS,
                )
            ),
        },
        usage=ref("Usage"),
    ),
    "ChatCompletion": record(
        {
            **_OF_ANSWER,
            "object": _is("chat.completion"),
            "choices": several(
                record({**_CHOICE, "message": _SAID}, **_MORE, **_OF_PROMPT, prompt_logprobs=_PROMPT_LOGPROBS)
            ),
            "usage": ref("Usage"),
        },
        prompt_logprobs=_PROMPT_LOGPROBS,
        **_OF_PROMPT,
    ),
    "ChatCompletionChunk": record(
        {
            **_OF_ANSWER,
            "object": _is("chat.completion.chunk"),
            "choices": several(record({**_CHOICE, "delta": record({}, role=TEXT, content=TEXT)}, **_MORE)),
        },
        usage=ref("Usage"),
        **_OF_PROMPT,
    ),
    "AnthropicMessage": record(
        {
            "id": TEXT,
            "type": _is("message"),
            "role": _is("assistant"),
            "model": TEXT,
            "content": several(record({"type": _is("text"), "text": TEXT})),
            "stop_reason": {
                "type": "string",
                "nullable": True,
                "enum": ["end_turn", "max_tokens", "stop_sequence", None],
            },
            "stop_sequence": MAYBE_TEXT,
            "usage": record(
                {
                    "input_tokens": INTEGER,
                    "cache_creation_input_tokens": INTEGER,
                    "cache_read_input_tokens": INTEGER,
                    "output_tokens": INTEGER,
                }
            ),
        }
    ),
    "TypedEvent": record({"type": TEXT}),
    "Response": record(
        {
            "id": TEXT,
            "object": _is("response"),
            "created_at": INTEGER,
            "model": TEXT,
            "status": {"type": "string", "enum": ["in_progress", "completed", "incomplete", "failed"]},
            "output": several(
                record(
                    {
                        "id": TEXT,
                        "type": _is("message"),
                        "role": TEXT,
                        "content": several(record({"type": _is("output_text"), "text": TEXT})),
                    }
                )
            ),
        },
        previous_response_id=MAYBE_TEXT,
        store=FLAG,
    ),
    "Model": record({"id": TEXT, "object": _is("model"), "created": INTEGER, "owned_by": TEXT}, max_model_len=INTEGER),
    "Error": record({"error": record({"message": TEXT, "type": TEXT, "param": MAYBE_TEXT, "code": MAYBE_TEXT})}),
    "AnthropicError": record({"type": _is("error"), "error": record({"type": TEXT, "message": TEXT})}),
}
