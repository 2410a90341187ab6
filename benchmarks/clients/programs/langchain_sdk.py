"""LangChain, by its package langchain-openai."""

import asyncio

from langchain_core.messages import HumanMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel
from report import CASE, check, same, trying

MODEL = {"base_url": f"{CASE.url}/v1", "api_key": CASE.key, "model": CASE.model, "temperature": 0}
ASKED = [HumanMessage(CASE.question)]


class Capital(BaseModel):
    """The capital of a country."""

    capital: str


def main() -> None:
    chat = ChatOpenAI(**MODEL, max_tokens=CASE.max_tokens)
    with trying("`invoke`"):
        message = chat.invoke(ASKED)
        same(message.content, CASE.answer)
        check(message.usage_metadata["output_tokens"] > 0, message.usage_metadata)
    with trying("`stream`"):
        chunks = list(chat.stream(ASKED))
        same("".join(chunk.content for chunk in chunks), CASE.answer)
        check(len(chunks) > 2, f"{len(chunks)} chunks")
    with trying("`batch`"):
        same([each.content for each in chat.batch([ASKED] * 4)], [CASE.answer] * 4)
    with trying("a chain with a prompt template"):
        chain = ChatPromptTemplate.from_messages([("user", "{question}")]) | chat
        same(chain.invoke({"question": CASE.question}).content, CASE.answer)
    with trying("`OpenAI` (completions): `invoke`, `stream`"):
        plain = OpenAI(**MODEL, max_tokens=CASE.max_tokens)
        same(plain.invoke(CASE.prompt), CASE.continuation)
        same("".join(plain.stream(CASE.prompt)), CASE.continuation)
    with trying("`logprobs`, `reasoning_effort`"):
        message = chat.bind(logprobs=True, reasoning_effort="low").invoke(ASKED)
        check(message.response_metadata["logprobs"]["content"], message.response_metadata)
    responding = ChatOpenAI(**MODEL, max_tokens=CASE.max_tokens, use_responses_api=True)
    with trying("`use_responses_api`: `invoke`, `stream`"):
        same(responding.invoke(ASKED).text, CASE.answer)
        same("".join(chunk.text for chunk in responding.stream(ASKED)), CASE.answer)
    with trying("`use_responses_api` with `use_previous_response_id`"):
        going_on = ChatOpenAI(
            **MODEL, max_tokens=CASE.max_tokens, use_responses_api=True, use_previous_response_id=True
        )
        first = going_on.invoke(ASKED)
        check("Rome" in going_on.invoke([*ASKED, first, HumanMessage("And of Italy?")]).text, "no Rome")
    with trying("`bind_tools`: an answer in text"):
        check(chat.bind_tools([Capital]).invoke(ASKED).content, "no text")
    with trying("`bind_tools`, `tool_choice: any`", is_to_come=True):
        check(chat.bind_tools([Capital], tool_choice="any").invoke(ASKED).tool_calls, "no tool calls")
    for method in ("json_schema", "function_calling", "json_mode"):
        with trying(f"`with_structured_output`, `{method}`", is_to_come=True):
            same(chat.with_structured_output(Capital, method=method).invoke(ASKED).capital, "Paris")
    asyncio.run(awaited(chat))


async def awaited(chat: ChatOpenAI) -> None:
    with trying("`ainvoke`, `astream`, `abatch`"):
        same((await chat.ainvoke(ASKED)).content, CASE.answer)
        same("".join([chunk.content async for chunk in chat.astream(ASKED)]), CASE.answer)
        same([each.content for each in await chat.abatch([ASKED] * 4)], [CASE.answer] * 4)
    with trying("`astream_events`"):
        events = [event async for event in chat.astream_events(ASKED, version="v2")]
        texts = [event["data"]["chunk"].content for event in events if event["event"] == "on_chat_model_stream"]
        same("".join(texts), CASE.answer)
        same(events[-1]["event"], "on_chat_model_end")


if __name__ == "__main__":
    main()
