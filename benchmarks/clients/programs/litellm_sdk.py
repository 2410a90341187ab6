"""LiteLLM, by its providers for servers that speak OpenAI's API."""

import asyncio
import os
from typing import Any

# Else LiteLLM asks the internet for prices when it is imported.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from report import CASE, CHAT, COMPLETION, SCHEMA, TOOL, check, same, trying

SERVER: dict[str, Any] = {"api_base": f"{CASE.url}/v1", "api_key": CASE.key}


def main() -> None:
    for provider in ("openai", "hosted_vllm"):
        chat = {**CHAT, **SERVER, "model": f"{provider}/{CASE.model}"}
        with trying(f"`completion`, provider `{provider}`"):
            same(litellm.completion(**chat).choices[0].message.content, CASE.answer)
        with trying(f"`completion`, streamed, provider `{provider}`"):
            same(text_of(litellm.completion(**chat, stream=True)), CASE.answer)
    chat = {**CHAT, **SERVER, "model": f"hosted_vllm/{CASE.model}"}
    with trying("`batch_completion`"):
        asked = {**chat, "messages": [CHAT["messages"]] * 4}
        same([each.choices[0].message.content for each in litellm.batch_completion(**asked)], [CASE.answer] * 4)
    with trying("`text_completion`, also streamed"):
        asked = {**COMPLETION, **SERVER, "model": f"text-completion-openai/{CASE.model}"}
        same(litellm.text_completion(**asked).choices[0].text, CASE.continuation)
        chunks = litellm.text_completion(**asked, stream=True)
        same("".join(chunk.choices[0].text or "" for chunk in chunks), CASE.continuation)
    with trying("`responses`"):
        answer = litellm.responses(
            **SERVER,
            model=f"openai/{CASE.model}",
            input=CASE.question,
            temperature=0,
            max_output_tokens=CASE.max_tokens,
        )
        same(answer.output[0].content[0].text, CASE.answer)
    with trying("provider `anthropic`"):
        asked = {**CHAT, "model": f"anthropic/{CASE.model}", "api_base": CASE.url, "api_key": CASE.key}
        same(litellm.completion(**asked).choices[0].message.content, CASE.answer)
    with trying("`tool_choice: required`", is_to_come=True):
        litellm.completion(**chat, tools=[{"type": "function", "function": TOOL}], tool_choice="required")
    with trying("`response_format: json_schema`", is_to_come=True):
        schema = {"type": "json_schema", "json_schema": {"name": "capital", "schema": SCHEMA, "strict": True}}
        litellm.completion(**chat, response_format=schema)
    asyncio.run(awaited(chat))


def text_of(chunks: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


async def awaited(chat: dict[str, Any]) -> None:
    with trying("`acompletion`, also streamed"):
        same((await litellm.acompletion(**chat)).choices[0].message.content, CASE.answer)
        chunks = [chunk async for chunk in await litellm.acompletion(**chat, stream=True)]
        same(text_of(chunks), CASE.answer)
        check(len(chunks) > 2, f"{len(chunks)} chunks")


if __name__ == "__main__":
    main()
