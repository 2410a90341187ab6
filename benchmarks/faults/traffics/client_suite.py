"""Tries all that octavo-client does against a cluster. Runs in an environment with nothing but octavo-client.

    python client_suite.py TARGET,TARGET

Prints a line for each check: `ok NAME SECONDS`, or `FAILED NAME: WHY`. A line `kill KIND NUMBER` asks the caller to
kill that process with -9, and waits for a line on stdin.
"""

import asyncio
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import octavo
from octavo import AsyncClient, Client, Constraint, Delta, SamplingParams, Started, Tool
from octavo.client import errors
from octavo.client.admin import Admin

PROMPT = "Once upon a time, in a small town by the sea,"
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, seed=11, max_tokens=48, ignore_eos=True, n=2)
# So long that a kill finds the stream in its middle.
LONG = SamplingParams(temperature=0.8, seed=5, max_tokens=120, ignore_eos=True)
HEAVY = {"torch", "numpy", "zmq", "pydantic", "tenacity", "transformers", "tokenizers", "fastapi", "starlette"}

Targets = list[str]


def kill(kind: str, number: int = 0) -> None:
    print(f"kill {kind} {number}", flush=True)
    assert sys.stdin.readline(), "the caller has gone"


def a_result_is_whole(targets: Targets) -> None:
    with Client(targets) as client:
        one = client.generate(PROMPT, SAMPLED)
        again = client.generate(PROMPT, SAMPLED)
    assert one.choices == again.choices
    assert [len(choice.token_ids) for choice in one.choices] == [48, 48]
    assert one.choices[0].token_ids != one.choices[1].token_ids
    assert one.usage is not None
    assert one.usage.completion_tokens == 96


def a_chat_answers(targets: Targets) -> None:
    with Client(targets) as client:
        answer = client.chat(
            "What is the capital of France? Answer briefly.", SamplingParams(temperature=0, max_tokens=16)
        )
    assert "Paris" in answer.text, answer.text


def a_stream_is_the_result_in_pieces(targets: Targets) -> None:
    with Client(targets) as client:
        whole = client.generate(PROMPT, GREEDY)
        with client.stream(PROMPT, GREEDY) as stream:
            events = list(stream)
    assert isinstance(events[0], Started)
    deltas = [event for event in events if isinstance(event, Delta)]
    assert "".join(delta.text for delta in deltas) == whole.text
    assert len(deltas) > 1


def many_at_once_are_as_one_by_one(targets: Targets) -> None:
    prompts = [f"{PROMPT} {number}" for number in range(6)]

    async def all_at_once() -> list[str]:
        async with AsyncClient(targets) as client:
            return [each.text for each in await asyncio.gather(*(client.generate(each, GREEDY) for each in prompts))]

    together = asyncio.run(all_at_once())
    with Client(targets) as client:
        assert together == [client.generate(each, GREEDY).text for each in prompts]


def logprobs_come(targets: Targets) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    with Client(targets) as client:
        result = client.generate(PROMPT, sampling)
    assert [len(each.top) for each in result.choices[0].logprobs] == [3] * 6
    assert len(result.prompt_logprobs) == len(result.prompt_token_ids) - 1
    assert all(each.chosen.token_id == each.top[0].token_id for each in result.choices[0].logprobs)


def outputs_have_their_form(targets: Targets) -> None:
    age = {"type": "integer", "minimum": 0, "maximum": 120}
    schema = {"type": "object", "properties": {"age": age}, "required": ["age"], "additionalProperties": False}
    with Client(targets) as client:
        sampling = SamplingParams(temperature=0, max_tokens=60, constraint=Constraint(json=schema))
        assert isinstance(json.loads(client.chat("How old is Ann, who is 31?", sampling).text)["age"], int)
        sampling = SamplingParams(temperature=0, max_tokens=8, constraint=Constraint(choice=["red", "green"]))
        assert client.chat("Red or green?", sampling).text in ("red", "green")


def tools_are_called(targets: Targets) -> None:
    cities = {"city": {"enum": ["Paris", "Rome"]}}
    schema = {"type": "object", "properties": cities, "required": ["city"], "additionalProperties": False}
    tool = Tool(name="get_weather", parameters=schema, strict=True)
    with Client(targets) as client:
        sampling = SamplingParams(temperature=0, max_tokens=80)
        result = client.chat("How is the weather in Rome?", sampling, tools=[tool], tool_choice=tool)
    [call] = result.choices[0].tool_calls
    assert call.name == "get_weather"
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")


def texts_and_tokens(targets: Targets) -> None:
    with Client(targets) as client:
        assert client.detokenize(client.tokenize(PROMPT).token_ids) == PROMPT
        model = client.model()
        by_ids = client.generate(list(client.tokenize(PROMPT).token_ids), GREEDY)
        assert by_ids.text == client.generate(PROMPT, GREEDY).text
    assert model.vocab_size > 0


def a_request_is_cancelled(targets: Targets) -> None:
    with Client(targets) as client:
        assert not client.cancel("unknown")
        with client.stream(PROMPT, LONG, request_id="cancelled") as stream:
            try:
                for event in stream:
                    if isinstance(event, Delta):
                        # From the other router, too.
                        with Client(targets[-1]) as other:
                            other.cancel("cancelled")
            except errors.Cancelled:
                return
    raise AssertionError("it went on")


def what_is_wrong_is_told(targets: Targets) -> None:
    with Client(targets) as client:
        wrong: list[tuple[type[BaseException], Callable[[], Any]]] = [
            (errors.InvalidRequest, lambda: client.generate(PROMPT, SamplingParams(temperature=-1))),
            (errors.InvalidRequest, lambda: client.generate("x" * 200_000, GREEDY)),
            (errors.ModelNotFound, lambda: client.generate(PROMPT, GREEDY, model="another")),
            (errors.RequestNotFound, lambda: list(client.attach("unknown"))),
            (errors.DeadlineExceeded, lambda: client.generate(PROMPT, LONG, timeout=0.05)),
        ]
        for kind, call in wrong:
            try:
                call()
            except kind:
                continue
            raise AssertionError(f"no {kind.__name__}")
    for name in ("LLM", "AsyncLLM"):
        assert "install octavo" in _lacking(name)
    assert not HEAVY & {name.partition(".")[0] for name in sys.modules}


def _lacking(name: str) -> str:
    """Returns what is said of a name that needs more than octavo-client."""
    try:
        getattr(octavo, name)
    except ImportError as error:
        return str(error)
    raise AssertionError(name)


def a_stream_is_attached_to(targets: Targets) -> None:
    with Client(targets) as client:
        whole = client.generate(PROMPT, LONG)
        with client.stream(PROMPT, LONG, request_id="held", detach_timeout=60) as stream:
            _tokens(stream, 5)
        with Client(targets[-1]) as other, other.attach("held") as first:
            _tokens(first, 5)
            with client.attach("held") as second:
                list(second)
            assert second.generation.choices == whole.choices
            try:
                list(first)
            except errors.Superseded:
                return
            raise AssertionError("the earlier reader went on")


def the_admin_calls_answer(targets: Targets) -> None:
    with Client(targets[0]) as client, Admin(targets[-1]) as admin:
        whole = client.generate(PROMPT, LONG)
        with client.stream(PROMPT, LONG, request_id="moved") as stream:
            _tokens(stream, 5)
            moved = admin.migrate("moved")
            assert moved.moved_from != moved.moved_to
            list(stream)
        assert stream.generation.choices == whole.choices
        assert len(admin.explain("moved").timelines) == 2
        assert admin.reset_prefix_cache().num_blocks > 0
        assert len(admin.observe().replicas) == 2


def _streams_through(kind: str, targets: Targets) -> None:
    """A synchronous and an asynchronous stream live while a process dies."""
    with Client(targets) as client:
        whole = client.generate(PROMPT, LONG)
    both_begun, found = threading.Barrier(3), list[Any]()

    def in_thread() -> None:
        with Client(targets) as client, client.stream(PROMPT, LONG) as stream:
            _tokens(stream, 8)
            both_begun.wait(60)
            for _ in stream:
                pass
            found.append(stream.generation)

    async def in_tasks() -> None:
        async with AsyncClient(targets) as client, client.stream(PROMPT, LONG) as stream:
            num_tokens = 0
            async for event in stream:
                if isinstance(event, Delta) and num_tokens < 8 <= num_tokens + len(event.token_ids):
                    await asyncio.to_thread(both_begun.wait, 60)
                num_tokens += len(event.token_ids) if isinstance(event, Delta) else 0
            found.append(stream.generation)

    threads = [threading.Thread(target=in_thread), threading.Thread(target=lambda: asyncio.run(in_tasks()))]
    for thread in threads:
        thread.start()
    both_begun.wait(60)
    kill(kind)
    for thread in threads:
        thread.join(120)
    assert [each.choices for each in found] == [whole.choices] * 2, "another output than undisturbed"
    if kind == "router":
        assert all(each.num_resumes for each in found), "the kill came too late"


def _router_killed(targets: Targets) -> None:
    _streams_through("router", targets)


def _scheduler_killed(targets: Targets) -> None:
    _streams_through("scheduler", targets)


def _worker_killed(targets: Targets) -> None:
    _streams_through("worker", targets)


def _attached_router_killed(targets: Targets) -> None:
    """A reader is attached through one router to a stream that the other one holds, which dies."""
    first, *others = targets
    with Client(targets) as client:
        whole = client.generate(PROMPT, LONG)
    with Client(first) as client, client.stream(PROMPT, LONG, request_id="orphan", detach_timeout=60) as stream:
        _tokens(stream, 3)
    with Client([*others, first]) as client, client.attach("orphan") as reader:
        _tokens(reader, 6)
        kill("router")
        list(reader)
    assert reader.generation.choices == whole.choices
    assert reader.generation.num_resumes


def _tokens(stream: Iterator[Any], count: int) -> None:
    """Reads until so many tokens have come."""
    for event in stream:
        if isinstance(event, Delta):
            count -= len(event.token_ids)
            if count <= 0:
                return
    raise AssertionError("the stream ended too early")


CHECKS: dict[str, Callable[[Targets], None]] = {
    "a result is whole": a_result_is_whole,
    "a chat answers": a_chat_answers,
    "a stream is the result in pieces": a_stream_is_the_result_in_pieces,
    "many at once are as one by one": many_at_once_are_as_one_by_one,
    "logprobs come": logprobs_come,
    "outputs have their form": outputs_have_their_form,
    "tools are called": tools_are_called,
    "texts and tokens": texts_and_tokens,
    "a request is cancelled through the other router": a_request_is_cancelled,
    "what is wrong is told": what_is_wrong_is_told,
    "a stream is attached to, the earlier reader superseded": a_stream_is_attached_to,
    "admin calls answer, a stream is migrated": the_admin_calls_answer,
    "streams survive kill -9 of their router": _router_killed,
    "streams survive kill -9 of a scheduler": _scheduler_killed,
    "streams survive kill -9 of a worker": _worker_killed,
    "a reader survives kill -9 of the router that held its stream": _attached_router_killed,
}


def main() -> int:
    targets, num_failed = sys.argv[1].split(","), 0
    for name, check in CHECKS.items():
        began = time.monotonic()
        try:
            check(targets)
        except Exception as error:  # noqa: BLE001 - the other checks run
            num_failed += 1
            where = traceback.extract_tb(error.__traceback__)[-1]
            print(f"FAILED {name}: {error!r} ({where.name}:{where.lineno})".replace("\n", " "), flush=True)
        else:
            print(f"ok {name} {time.monotonic() - began:.1f}", flush=True)
    return int(bool(num_failed))


if __name__ == "__main__":
    sys.exit(main())
