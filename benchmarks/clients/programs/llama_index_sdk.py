"""LlamaIndex, by its package llama-index-llms-openai-like."""

import asyncio

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from report import CASE, same, trying

ASKED = [ChatMessage(role="user", content=CASE.question)]


class Capital(BaseModel):
    """The capital of a country."""

    capital: str


def model(*, is_chat_model: bool, **options: object) -> OpenAILike:
    return OpenAILike(
        model=CASE.model, api_base=f"{CASE.url}/v1", api_key=CASE.key, temperature=0, max_tokens=CASE.max_tokens,
        is_chat_model=is_chat_model, context_window=2048, **options,
    )  # fmt: skip


def main() -> None:
    chat, plain = model(is_chat_model=True), model(is_chat_model=False)
    with trying("`chat`"):
        same(chat.chat(ASKED).message.content, CASE.answer)
    with trying("`stream_chat`"):
        same("".join(each.delta or "" for each in chat.stream_chat(ASKED)), CASE.answer)
    with trying("`complete`"):
        same(plain.complete(CASE.prompt).text, CASE.continuation)
    with trying("`stream_complete`"):
        same("".join(each.delta or "" for each in plain.stream_complete(CASE.prompt)), CASE.continuation)
    with trying("`structured_predict` by `response_format`", is_to_come=True):
        from llama_index.core.prompts import PromptTemplate

        strict = model(is_chat_model=True, should_use_structured_outputs=True)
        strict.structured_predict(Capital, PromptTemplate(CASE.question))
    asyncio.run(awaited(chat, plain))


async def awaited(chat: OpenAILike, plain: OpenAILike) -> None:
    with trying("`achat`, `astream_chat`"):
        same((await chat.achat(ASKED)).message.content, CASE.answer)
        same("".join([each.delta or "" async for each in await chat.astream_chat(ASKED)]), CASE.answer)
    with trying("`acomplete`, `astream_complete`"):
        same((await plain.acomplete(CASE.prompt)).text, CASE.continuation)
        pieces = [each.delta or "" async for each in await plain.astream_complete(CASE.prompt)]
        same("".join(pieces), CASE.continuation)


if __name__ == "__main__":
    main()
