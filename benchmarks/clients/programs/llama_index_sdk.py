"""LlamaIndex, by its package llama-index-llms-openai-like."""

import asyncio

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from report import ASKS_WEATHER, CAPITAL, CASE, check, get_weather, knows, same, trying

ASKED = [ChatMessage(role="user", content=CASE.question)]


class Capital(BaseModel):
    """The capital of a country."""

    capital: str


def model(*, is_chat_model: bool, **options: object) -> OpenAILike:
    return OpenAILike(
        model=CASE.model,
        api_base=f"{CASE.url}/v1",
        api_key=CASE.key,
        temperature=0,
        is_chat_model=is_chat_model,
        context_window=2048,
        **{"max_tokens": CASE.max_tokens, **options},
    )


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
    schemas()
    calling = model(is_chat_model=True, is_function_calling_model=True, max_tokens=CASE.max_call_tokens)
    calls(calling)
    asyncio.run(agents(calling))
    asyncio.run(awaited(chat, plain))


def schemas() -> None:
    question = PromptTemplate(CASE.question)
    for what, options in {
        "`response_format`": {"should_use_structured_outputs": True},
        "calls": {"is_function_calling_model": True, "max_tokens": CASE.max_call_tokens},
    }.items():
        llm = model(is_chat_model=True, **options)
        with trying(f"`structured_predict` by {what}"):
            same(llm.structured_predict(Capital, question), Capital(capital=CAPITAL))
        with trying(f"`as_structured_llm` by {what}"):
            same(llm.as_structured_llm(Capital).chat(ASKED).raw, Capital(capital=CAPITAL))
    # By calls it asks for none: the model may answer in text.
    llm = model(is_chat_model=True, should_use_structured_outputs=True)
    with trying("`stream_structured_predict` by `response_format`"):
        same(list(llm.stream_structured_predict(Capital, question))[-1].capital, CAPITAL)


def calls(llm: OpenAILike) -> None:
    tool = FunctionTool.from_defaults(get_weather)
    question = ASKS_WEATHER["content"]
    for what, options in {"": {}, ", `tool_required`": {"tool_required": True}}.items():
        with trying(f"`chat_with_tools`{what}: a tool's round trip"):
            said = llm.chat_with_tools([tool], user_msg=question, **options)
            results = [
                ChatMessage(
                    role="tool",
                    content=str(tool.call(**call.tool_kwargs)),
                    additional_kwargs={"tool_call_id": call.tool_id},
                )
                for call in llm.get_tool_calls_from_response(said)
            ]
            history = [ChatMessage(role="user", content=question), said.message, *results]
            knows(llm.chat_with_tools([tool], chat_history=history).message.content)
    with trying("`stream_chat_with_tools`, `predict_and_call`"):
        *_, last = llm.stream_chat_with_tools([tool], user_msg=question)
        check(llm.get_tool_calls_from_response(last), last)
        knows(str(llm.predict_and_call([tool], user_msg=question)))


async def agents(llm: OpenAILike) -> None:
    with trying("`FunctionAgent`"):
        agent = FunctionAgent(tools=[FunctionTool.from_defaults(get_weather)], llm=llm)
        knows(str(await agent.run(ASKS_WEATHER["content"])))


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
