"""OpenAI's SDK for Python."""

import asyncio
import time
from typing import Any

import openai
from report import CASE, CHAT, COMPLETION, SCHEMA, TOOL, check, same, trying

BASE = f"{CASE.url}/v1"
# More than the slow key has in a minute.
MANY = 20


def main() -> None:
    with openai.OpenAI(base_url=BASE, api_key=CASE.key) as client:
        chats(client)
        completions(client)
        responses(client)
        others(client)
    with openai.OpenAI(base_url=BASE, api_key=CASE.slow_key) as client:
        retries(client)
    asyncio.run(awaited())


def chats(client: openai.OpenAI) -> None:
    create = client.chat.completions.create
    with trying("chat"):
        same(create(**CHAT).choices[0].message.content, CASE.answer)
    with trying("chat, streamed, with usage"):
        text, usage = "", None
        for chunk in create(**CHAT, stream=True, stream_options={"include_usage": True}):
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage
        same(text, CASE.answer)
        check(usage is not None and usage.completion_tokens > 0, usage)
    with trying("`chat.completions.stream`"), client.chat.completions.stream(**CHAT) as stream:
        stream.until_done()
        same(stream.get_final_completion().choices[0].message.content, CASE.answer)
    with trying("`with_raw_response`"):
        raw = client.chat.completions.with_raw_response.create(**CHAT)
        same((raw.status_code, raw.parse().choices[0].message.content), (200, CASE.answer))
    with trying("`with_streaming_response`"), client.chat.completions.with_streaming_response.create(**CHAT) as raw:
        check(CASE.answer in raw.read().decode(), raw.text())
    with trying("`n`, `logprobs`, `stop`, `seed`"):
        asked: dict[str, Any] = {**CHAT, "n": 2, "logprobs": True, "top_logprobs": 3, "stop": ["\n\n"], "seed": 1}
        choices = create(**asked).choices
        same([choice.message.content for choice in choices], [CASE.answer] * 2)
        check(all(len(each.top_logprobs) == 3 for each in choices[0].logprobs.content), choices[0].logprobs)
    with trying("`extra_body` with vLLM's fields"):
        asked = {"top_k": 1, "min_tokens": 2, "return_token_ids": True}
        check(create(**CHAT, extra_body=asked).choices[0].model_extra.get("token_ids"), "no token_ids")
    with trying("tools, `tool_choice: auto`: an answer in text"):
        check(create(**CHAT, tools=[{"type": "function", "function": TOOL}]).choices[0].message.content, "no text")
    with trying("tools, `tool_choice: required`", is_to_come=True):
        answer = create(**CHAT, tools=[{"type": "function", "function": TOOL}], tool_choice="required")
        check(answer.choices[0].message.tool_calls, answer)
    with trying("`response_format: json_schema`", is_to_come=True):
        schema = {"name": "capital", "schema": SCHEMA, "strict": True}
        create(**CHAT, response_format={"type": "json_schema", "json_schema": schema})


def completions(client: openai.OpenAI) -> None:
    with trying("completion"):
        same(client.completions.create(**COMPLETION).choices[0].text, CASE.continuation)
    with trying("completion, streamed"):
        chunks = client.completions.create(**COMPLETION, stream=True)
        same("".join(chunk.choices[0].text for chunk in chunks), CASE.continuation)
    with trying("several prompts, `echo` with `logprobs`"):
        asked = {**COMPLETION, "prompt": [CASE.prompt] * 2, "echo": True, "logprobs": 1}
        choices = client.completions.create(**asked).choices
        same([choice.text for choice in choices], [CASE.prompt + CASE.continuation] * 2)
        check(choices[1].logprobs.token_logprobs[0] is None, choices[1].logprobs)


def responses(client: openai.OpenAI) -> None:
    asked = {"model": CASE.model, "input": CASE.question, "temperature": 0, "max_output_tokens": CASE.max_tokens}
    first = None
    with trying("`responses.create`"):
        first = client.responses.create(**asked)
        same(first.output_text, CASE.answer)
    with trying("`responses.create`, streamed"):
        events = list(client.responses.create(**asked, stream=True))
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        same("".join(deltas), CASE.answer)
        same((events[0].type, events[-1].type), ("response.created", "response.completed"))
    with trying("`responses.stream`"), client.responses.stream(**asked) as stream:
        same(stream.get_final_response().output_text, CASE.answer)
    with trying("`previous_response_id`, `responses.retrieve`, `responses.delete`"):
        next_one = client.responses.create(**{**asked, "input": "And of Italy?"}, previous_response_id=first.id)
        check("Rome" in next_one.output_text, next_one.output_text)
        same(client.responses.retrieve(next_one.id).output_text, next_one.output_text)
        client.responses.delete(next_one.id)
    with trying("`responses.create`, `text.format: json_schema`", is_to_come=True):
        text = {"format": {"type": "json_schema", "name": "capital", "schema": SCHEMA, "strict": True}}
        client.responses.create(**asked, text=text)


def others(client: openai.OpenAI) -> None:
    with trying("`models.list`, `models.retrieve`"):
        check(CASE.model in [model.id for model in client.models.list()], "not in the list")
        same(client.models.retrieve(CASE.model).id, CASE.model)
    with trying("typed errors: `AuthenticationError`, `BadRequestError`, `NotFoundError`"):
        with expected(openai.AuthenticationError):
            client.with_options(api_key="wrong").chat.completions.create(**CHAT)
        with expected(openai.BadRequestError):
            client.chat.completions.create(**{**CHAT, "temperature": -1})
        with expected(openai.NotFoundError):
            client.chat.completions.create(**{**CHAT, "model": "another"})
    with trying("`embeddings`", is_to_come=True):
        client.embeddings.create(model=CASE.model, input="text")


class expected:  # Reads as pytest.raises does.
    def __init__(self, kind: type[Exception]) -> None:
        self._kind = kind

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        check(kind is not None, f"no {self._kind.__name__}")
        return kind is self._kind


def retries(client: openai.OpenAI) -> None:
    """Uses up a key's requests of a minute: then the router answers 429, with a Retry-After that the SDK follows."""
    with trying("retries: 429 with `Retry-After`, then the answer"):
        began = time.monotonic()
        for _ in range(MANY):
            raw = client.chat.completions.with_raw_response.create(**{**CHAT, "max_tokens": 1})
            if raw.retries_taken:
                break
        check(raw.retries_taken > 0, f"{MANY} requests in {time.monotonic() - began:.1f} s without a retry")


async def awaited() -> None:
    async with openai.AsyncOpenAI(base_url=BASE, api_key=CASE.key) as client:
        create = client.chat.completions.create
        with trying("async chat, 8 at once"):
            answers = await asyncio.gather(*(create(**CHAT) for _ in range(8)))
            same({answer.choices[0].message.content for answer in answers}, {CASE.answer})
        with trying("async chat, streamed"):
            chunks = [chunk async for chunk in await create(**CHAT, stream=True)]
            same("".join(chunk.choices[0].delta.content or "" for chunk in chunks), CASE.answer)


if __name__ == "__main__":
    main()
