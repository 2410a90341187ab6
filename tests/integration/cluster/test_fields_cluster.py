"""Fields of sampling that replicas announce, under `octavo up` with SmolLM2: real processes, over gRPC and HTTP."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from octavo import Client, FinishReason, InvalidRequest, RepetitionDetection, SamplingParams
from tests.fakes.routers import smollm2_tokenizer
from tests.support.ports import free_port
from tests.support.up import Up

QUESTION = "What is the capital of France? Answer briefly."


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, httpx.Client]]:
    http_port = free_port()
    flags = ("--kv-cache-memory=0.1", "--max-num-seqs=4", "--max-logprobs=64", f"--http-port={http_port}")
    with Up(tmp_path_factory.mktemp("up"), *flags, real=True) as up:
        up.wait_for("serving; Ctrl-C to stop")
        http = httpx.Client(base_url=f"http://localhost:{http_port}", timeout=60)
        with Client(f"localhost:{up.port}") as client, http:
            yield client, http


def _chat(http: httpx.Client, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": QUESTION}]
    answer = http.post("/v1/chat/completions", json={"messages": messages, "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def test_bad_words_do_not_appear(cluster: tuple[Client, httpx.Client]) -> None:
    client, http = cluster
    assert client.chat(QUESTION, SamplingParams(temperature=0)).text == "The capital of France is Paris."
    banned = client.chat(QUESTION, SamplingParams(temperature=0, max_tokens=20, bad_words=["Paris", "capital of"]))
    assert "Paris" not in banned.text
    assert "capital of" not in banned.text
    assert _chat(http, max_tokens=20, bad_words=["Paris", "capital of"])["message"]["content"] == banned.text
    # Drawn tokens, too: at this temperature nearly all of the vocabulary is likely.
    sampling = SamplingParams(temperature=1.5, seed=3, n=4, max_tokens=40, bad_words=["the", "a", ",", "."])
    drawn = client.generate("Once upon a time", sampling)
    ids = {token for choice in drawn.choices for token in choice.token_ids}
    tokenizer = smollm2_tokenizer()
    assert not ids & {tokenizer.encode(text)[0] for text in ("the", " the", "a", " a", ",", ".")}


def test_only_allowed_tokens_appear(cluster: tuple[Client, httpx.Client]) -> None:
    client, http = cluster
    tokenizer = smollm2_tokenizer()
    allowed = [tokenizer.encode(text)[0] for text in ("London", "Paris", "Rome")]
    sampling = SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=allowed)
    assert client.chat(QUESTION, sampling).text == "Paris"
    assert _chat(http, max_tokens=1, allowed_token_ids=allowed)["message"]["content"] == "Paris"
    sampling = SamplingParams(temperature=1, seed=1, n=4, max_tokens=12, allowed_token_ids=allowed, top_k=9)
    drawn = client.chat(QUESTION, sampling)
    assert {token for choice in drawn.choices for token in choice.token_ids} <= set(allowed)
    with pytest.raises(InvalidRequest, match=r"allowed_token_ids has only tokens that end the output"):
        client.chat(QUESTION, SamplingParams(min_tokens=1, allowed_token_ids=client.model().eos_token_ids))


def test_logprobs_of_listed_tokens(cluster: tuple[Client, httpx.Client]) -> None:
    client, http = cluster
    cities = {text: smollm2_tokenizer().encode(text)[0] for text in ("London", "Paris", "Rome")}
    ids = list(cities.values())
    prompt = "Paris or Rome?"
    full = client.generate(prompt, SamplingParams(temperature=0, max_tokens=3, logprobs=20))
    listed = client.generate(prompt, SamplingParams(temperature=0, max_tokens=3, logprob_token_ids=[*ids, ids[0]]))
    for each, its in zip(listed.choices[0].logprobs, full.choices[0].logprobs, strict=True):
        assert each.chosen == its.chosen
        assert [top.token_id for top in each.top] == ids
        known = {top.token_id: top.logprob for top in its.top}
        assert all(known.get(top.token_id, top.logprob) == top.logprob for top in each.top)
        assert all(top.logprob < 0 for top in each.top)
    shown = _chat(http, max_tokens=2, logprobs=True, logprob_token_ids=ids)["logprobs"]["content"]
    for each in shown:
        names = [top["token"] for top in each["top_logprobs"]]
        assert names[0] == each["token"]
        assert set(names) == {each["token"], *cities}


def test_as_many_logprobs_as_max_logprobs_says(cluster: tuple[Client, httpx.Client]) -> None:
    client, http = cluster
    scored = client.generate(
        "Paris or Rome?", SamplingParams(temperature=0, max_tokens=2, logprobs=64, prompt_logprobs=40)
    )
    assert [len(each.top) for each in scored.choices[0].logprobs] == [64, 64]
    assert {len(each.top) for each in scored.prompt_logprobs} == {40}
    few = client.generate("Paris or Rome?", SamplingParams(temperature=0, max_tokens=2, logprobs=3))
    assert [each.top[:3] for each in scored.choices[0].logprobs] == [each.top for each in few.choices[0].logprobs]
    (shown, _) = _chat(http, max_tokens=2, logprobs=True, top_logprobs=50)["logprobs"]["content"]
    assert len(shown["top_logprobs"]) == 50
    with pytest.raises(InvalidRequest, match=r"logprobs=-1 asks for all 49152 tokens: max_logprobs=64"):
        client.generate("Hello", SamplingParams(max_tokens=2, logprobs=-1))


def test_a_wide_beam_search_gets_the_logprobs_that_it_needs(cluster: tuple[Client, httpx.Client]) -> None:
    """More than a request may ask for by default."""
    client, _ = cluster
    found = client.generate("Paris or Rome?", SamplingParams(max_tokens=3, n=2), beam_width=24)
    assert [len(choice.token_ids) for choice in found.choices] == [3, 3]


def test_an_output_that_repeats_itself_ends(cluster: tuple[Client, httpx.Client]) -> None:
    client, http = cluster
    paris = smollm2_tokenizer().encode("Paris")
    rule = RepetitionDetection(max_pattern_size=3, min_count=4)
    sampling = SamplingParams(temperature=0, max_tokens=50, allowed_token_ids=paris, repetition_detection=rule)
    (choice,) = client.chat(QUESTION, sampling).choices
    assert (choice.token_ids, choice.finish_reason) == (tuple(paris * 4), FinishReason.REPETITION)
    asked = {"max_pattern_size": 2, "min_pattern_size": 2, "min_count": 3}
    shown = _chat(http, max_tokens=50, min_tokens=5, allowed_token_ids=paris, repetition_detection=asked)
    assert (shown["message"]["content"], shown["finish_reason"]) == ("Paris" * 6, "repetition")
    assert shown["stop_reason"] == "repetition_detected"
    off = _chat(http, max_tokens=9, allowed_token_ids=paris, repetition_detection={"max_pattern_size": 0})
    assert off["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"allowed_token_ids": [5] * 1025}, "allowed_token_ids"),
        ({"bad_words": "no"}, "bad_words"),
        ({"bad_words": ["a", ""]}, "bad_words"),
        ({"bad_words": ["  "]}, "bad_words"),
        ({"bad_words": ["a"] * 129}, "bad_words"),
        ({"repetition_detection": {"max_pattern_size": 1025, "min_count": 2}}, "repetition_detection"),
        ({"repetition_detection": {"max_pattern_size": 2, "min_count": 1}}, "repetition_detection"),
        ({"repetition_detection": {"max_pattern_size": 1, "min_pattern_size": 2}}, "repetition_detection"),
        ({"repetition_detection": {"max_pattern_size": -1}}, "repetition_detection"),
        ({"repetition_detection": 3}, "repetition_detection"),
        ({"logprobs": 65}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": -2}, "prompt_logprobs"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"logprob_token_ids": [10**6], "logprobs": 1}, "logprob_token_ids"),
        ({"logprob_token_ids": [5] * 129, "logprobs": 1}, "logprob_token_ids"),
    ],
)
def test_bad_values_are_refused_by_name(cluster: tuple[Client, httpx.Client], body: dict[str, Any], param: str) -> None:
    _, http = cluster
    answer = http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 2, **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
