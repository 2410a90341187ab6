"""Anthropic's SDK for Python."""

import asyncio
from typing import Any

import anthropic
from report import CASE, MESSAGES, SCHEMA, check, same, trying

ASKED: dict[str, Any] = {
    "model": CASE.model,
    "max_tokens": CASE.max_tokens,
    "messages": MESSAGES,
    # The SDK has no such argument.
    "extra_body": {"temperature": 0},
}
TOOL = {"name": "capital", "description": "Looks up the capital of a country.", "input_schema": SCHEMA}
# More than the slow key has in a minute.
MANY = 20


def main() -> None:
    with anthropic.Anthropic(base_url=CASE.url, api_key=CASE.key) as client:
        called(client)
    with (
        anthropic.Anthropic(base_url=CASE.url, api_key=CASE.slow_key) as client,
        trying("retries: 429 with `Retry-After`, then the answer"),
    ):
        for _ in range(MANY):
            raw = client.messages.with_raw_response.create(**{**ASKED, "max_tokens": 1})
            if raw.retries_taken:
                break
        check(raw.retries_taken > 0, f"{MANY} requests without a retry")
    asyncio.run(awaited())


def called(client: anthropic.Anthropic) -> None:
    with trying("`messages.create`"):
        message = client.messages.create(**ASKED)
        same(message.content[0].text, CASE.answer)
        same(message.stop_reason, "end_turn")
    with trying("`messages.create`, streamed"):
        events = list(client.messages.create(**ASKED, stream=True))
        deltas = [event.delta.text for event in events if event.type == "content_block_delta"]
        same("".join(deltas), CASE.answer)
        same((events[0].type, events[-1].type), ("message_start", "message_stop"))
    with trying("`messages.stream`"), client.messages.stream(**ASKED) as stream:
        same("".join(stream.text_stream), CASE.answer)
        same(stream.get_final_message().content[0].text, CASE.answer)
    with trying("`messages.count_tokens`"):
        count = client.messages.count_tokens(model=CASE.model, messages=MESSAGES).input_tokens
        same(count, client.messages.create(**ASKED).usage.input_tokens + cached(client))
    with trying("`system`, `stop_sequences`, blocks of text"):
        blocks = [{"role": "user", "content": [{"type": "text", "text": CASE.question}]}]
        asked = {**ASKED, "messages": blocks, "system": "Answer briefly.", "stop_sequences": ["Paris"]}
        same(client.messages.create(**asked).stop_reason, "stop_sequence")
    with trying("tools, `tool_choice: auto`: an answer in text"):
        same(client.messages.create(**ASKED, tools=[TOOL]).content[0].type, "text")
    with trying("tools, `tool_choice: any`", is_to_come=True):
        client.messages.create(**ASKED, tools=[TOOL], tool_choice={"type": "any"})
    with trying("`output_config` with a JSON schema", is_to_come=True):
        client.messages.create(**ASKED, output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    with trying("typed errors: `AuthenticationError`, `BadRequestError`"):
        for wrong, kind in (
            (client.with_options(api_key="wrong"), anthropic.AuthenticationError),
            (client, anthropic.BadRequestError),
        ):
            try:
                wrong.messages.create(**{**ASKED, "max_tokens": -1})
            except kind:
                continue
            raise AssertionError(f"no {kind.__name__}")


def cached(client: anthropic.Anthropic) -> int:
    """Returns the cached tokens of the same message."""
    return client.messages.create(**ASKED).usage.cache_read_input_tokens or 0


async def awaited() -> None:
    async with anthropic.AsyncAnthropic(base_url=CASE.url, api_key=CASE.key) as client:
        with trying("async, streamed"):
            async with client.messages.stream(**ASKED) as stream:
                same("".join([text async for text in stream.text_stream]), CASE.answer)


if __name__ == "__main__":
    main()
