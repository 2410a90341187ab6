"""examples/: each program runs, and shows what it says. A tiny model of random weights with SmolLM2's tokenizer."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from octavo import FinishReason, Generation
from tests.fakes.routers import running_router, running_schedulers, smollm2_tokenizer, socket_address
from tests.fakes.scheduler import FakeScheduler
from tests.support.models.tiny_model import make_tiny_model
from tests.support.repository import ROOT
from tests.support.scheduler.costs import make_drafts_free

EXAMPLES = ROOT / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"examples.{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model = make_tiny_model(tmp_path_factory.mktemp("model"), vocab_size=49152, max_position_embeddings=2048)
    tokenizer = str(smollm2_tokenizer().directory)
    return {
        "model": str(model),
        "tokenizer": tokenizer,
        "load_format": "dummy",
        "dtype": "float32",
        "kv_cache_memory": 0.01,
        "worker_threads": 1,
    }


def tokens(result: Generation) -> tuple[int, ...]:
    return result.choices[0].token_ids


def test_all_examples_are_here_and_in_the_readme() -> None:
    files = {path.stem for path in EXAMPLES.glob("*.py")}
    assert files == set(re.findall(r'example\("(\w+)"\)', Path(__file__).read_text()))
    assert files == set(re.findall(r"^\| \[(\w+)\.py\]", (EXAMPLES / "README.md").read_text(), re.M))


def test_offline_generation(options: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    results = example("offline_generation").main(**options)
    assert [len(tokens(result)) for result in results] == [16] * 4
    assert capsys.readouterr().out.startswith("'Hello, my name is' -> ")


def test_streams_of_one_process(options: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    *others, aborted = example("async_streaming").main(**options)
    assert [len(tokens(other)) for other in others] == [24, 24]
    assert aborted.choices[0].finish_reason is FinishReason.CANCELLED
    assert "1 of 3 requests were aborted" in capsys.readouterr().out


async def test_clients_of_a_cluster(tmp_path: Path) -> None:
    scheduler = FakeScheduler(socket_address(tmp_path, "one"))
    async with running_schedulers(scheduler), running_router([scheduler.address]) as (server, _):
        await server.wait_ready()
        results = await example("async_clients").main(f"127.0.0.1:{server.port}")
    assert [len(tokens(result)) for result in results] == [12] * 16


def test_each_turn_of_a_chat_finds_the_last_one_in_the_cache(options: dict[str, Any]) -> None:
    first, second, third = (turn.usage for turn in example("multi_turn_chat").main(**options))
    assert first.cached_tokens == 0
    # The last token before the answer may be another one with the answer behind it.
    assert first.prompt_tokens - 17 < second.cached_tokens < second.prompt_tokens
    assert second.prompt_tokens - 17 < third.cached_tokens < third.prompt_tokens


def test_a_document_is_computed_once(options: dict[str, Any]) -> None:
    first, *others = example("automatic_prefix_caching").main(**options)
    assert first.usage.cached_tokens == 0
    assert all(other.usage.cached_tokens > other.usage.prompt_tokens - 40 for other in others)


def test_chunks_change_no_output(options: dict[str, Any]) -> None:
    (whole, _), (chunks, longest) = example("chunked_prefill").main(**options).values()
    assert whole == chunks
    assert longest > 0


def test_preempted_requests_lose_no_token(options: dict[str, Any]) -> None:
    enough, *others = example("preemption").main(**options).values()
    assert enough[1] == 0
    for results, num_preemptions in others:
        assert num_preemptions > 0
        assert [*map(tokens, results)] == [*map(tokens, enough[0])]


def test_two_workers_say_what_one_says(options: dict[str, Any]) -> None:
    one, two = example("parallelism").main(**options).values()
    assert one == two
    assert all(one)


def test_drafts_change_no_output(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    make_drafts_free(monkeypatch)
    plain, *drafted = example("speculative_decoding").main(**options).values()
    assert plain.usage.draft_tokens == 0
    for each in drafted:
        assert tokens(each) == tokens(plain)
        assert each.usage.accepted_draft_tokens > 0


def test_outputs_have_their_form(options: dict[str, Any]) -> None:
    person, date, answer = example("structured_output").main(**options)
    assert set(json.loads(person)) == {"name", "age"}
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", date)
    assert answer in ("yes", "no")
