"""Beam searches of a real cluster, over HTTP and gRPC: what transformers finds, also when a process dies.

A small random Llama in float32. `python -m benchmarks.cluster.beam_search` does the same with SmolLM2.
"""

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from octavo import LLM, Client, FinishReason, SamplingParams
from octavo.client.errors import InvalidRequest
from octavo.client.results import Started
from protos import inference_pb2 as pb
from protos.inference_pb2_grpc import InferenceStub
from tests.support.models.beams import transformers_beams
from tests.support.models.tiny_model import EOS, VOCAB_SIZE, make_tiny_model
from tests.support.ports import free_port
from tests.support.up import Up

PROMPTS = [list(range(first, first + 9 * first)) for first in (3, 5, 7)]
MAX_TOKENS = 24
STOPS = [7, 11, 13]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """Its weights are larger than usual: tokens differ in their probability."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def up(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    directory = tmp_path_factory.mktemp("beams")
    files = make_tiny_model(directory / "model")
    model.save_pretrained(files)
    http_port = free_port()
    with Up(
        directory,
        f"--model={files}",
        "--dtype=float32",
        "--kv-cache-memory=0.01",
        "--max-num-seqs=16",
        f"--http-port={http_port}",
        real=True,
    ) as up:
        up.wait_for("serving; Ctrl-C to stop")
        up.http_port = http_port  # type: ignore[attr-defined]
        yield up


def expected(model: LlamaForCausalLM, prompt: list[int], width: int, penalty: float) -> list[list[int]]:
    asked: dict[str, Any] = {"width": width, "length_penalty": penalty, "max_tokens": MAX_TOKENS}
    return transformers_beams(model, prompt, **asked, end_ids=[EOS, *STOPS]).token_ids


def searched(up: Up, path: str, **body: Any) -> list[dict[str, Any]]:
    body = {"use_beam_search": True, "max_tokens": MAX_TOKENS, "stop_token_ids": STOPS, "return_token_ids": True} | body
    answer = httpx.post(f"http://127.0.0.1:{up.http_port}/v1/{path}", json=body, timeout=60)  # type: ignore[attr-defined]
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def message(prompt: list[int], width: int, penalty: float) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=prompt),
        sampling=pb.SamplingParams(n=width, max_tokens=MAX_TOKENS, stop_token_ids=STOPS),
        beam_search=pb.BeamSearch(width=width, length_penalty=penalty),
    )


def test_it_finds_what_transformers_finds(model: LlamaForCausalLM, up: Up) -> None:
    lengths = set()
    with grpc.insecure_channel(f"127.0.0.1:{up.port}") as channel:
        stub = InferenceStub(channel)
        for prompt, width, penalty in itertools.product(PROMPTS, (2, 4), (-1.0, 1.0, 2.0)):
            outputs = expected(model, prompt, width, penalty)
            over_http = searched(up, "completions", prompt=prompt, n=width, length_penalty=penalty)
            assert [choice["token_ids"] for choice in over_http] == outputs, (prompt, width, penalty)
            assert [choice["index"] for choice in over_http] == list(range(width))
            result = stub.GenerateUnary(message(prompt, width, penalty))
            assert [list(choice.token_ids) for choice in result.choices] == outputs
            lengths |= {len(each) for each in outputs}
    assert len(lengths) > 2


def test_an_engine_without_a_cluster_finds_it_too(model: LlamaForCausalLM, tmp_path: Path) -> None:
    files = make_tiny_model(tmp_path / "model")
    model.save_pretrained(files)
    llm = LLM(str(files), dtype="float32", kv_cache_memory=0.01, worker_threads=1, max_num_seqs=16)
    sampling = SamplingParams(n=3, max_tokens=MAX_TOKENS, stop_token_ids=STOPS, logprobs=2)
    results = llm.generate(PROMPTS, sampling, beam_width=4, length_penalty=2.0)
    for prompt, result in zip(PROMPTS, results, strict=True):
        outputs = expected(model, prompt, 4, 2.0)[:3]
        assert [list(choice.token_ids) for choice in result.choices] == outputs
        for choice in result.choices:
            assert [position.chosen.token_id for position in choice.logprobs] == list(choice.token_ids)
            ended = choice.token_ids[-1] in (EOS, *STOPS)
            assert choice.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
        assert result.usage is not None
        assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (len(prompt), sum(map(len, outputs)))
    with pytest.raises(InvalidRequest, match=r"sampling\.n=3: use at most beam_search\.width, which is 2"):
        llm.generate(PROMPTS, sampling, beam_width=2)
    (plain,) = llm.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=2))
    assert len(plain.choices) == 1


@pytest.mark.parametrize("victim", ["worker", "scheduler", "router"])
def test_a_killed_process_costs_no_beam(model: LlamaForCausalLM, up: Up, victim: str) -> None:
    """The process is killed while the searches are under way: each ends as if nothing had happened."""
    width, max_tokens = 4, 180
    sampling = SamplingParams(n=width, max_tokens=max_tokens, min_tokens=max_tokens, stop_token_ids=STOPS)
    found: dict[int, list[list[int]]] = {}
    begun = threading.Barrier(3)

    def search(client: Client, number: int) -> None:
        with client.stream(PROMPTS[number], sampling, beam_width=width, length_penalty=0.0) as stream:
            assert isinstance(next(stream), Started)
            begun.wait()
            for _ in stream:
                pass
            found[number] = [list(choice.token_ids) for choice in stream.generation.choices]

    with Client(f"127.0.0.1:{up.port}", timeout=60) as client:
        threads = [threading.Thread(target=search, args=(client, number)) for number in range(2)]
        killed = up.child(victim)
        for thread in threads:
            thread.start()
        begun.wait()
        # A search takes about a second.
        threads[0].join(0.2)
        assert not found
        killed.kill()
        psutil.wait_procs([killed], timeout=10)
        for thread in threads:
            thread.join()
    for number in range(2):
        outputs = transformers_beams(
            model,
            PROMPTS[number],
            width=width,
            length_penalty=0.0,
            max_tokens=max_tokens,
            min_tokens=max_tokens,
            end_ids=[EOS, *STOPS],
        )
        # Its length shows that nothing ended it early.
        assert found[number] == outputs.token_ids
        assert {len(each) for each in found[number]} == {max_tokens}


def test_options_that_make_no_search(up: Up) -> None:
    with Client(f"127.0.0.1:{up.port}") as client:
        for options in ({"beam_width": -1}, {"beam_width": 99}, {"length_penalty": 2.0}):
            with pytest.raises(InvalidRequest, match=r"beam_width|beam_search\.width=99"):
                client.generate(PROMPTS[0], **options)  # type: ignore[arg-type]
