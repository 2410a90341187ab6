"""A cluster of real processes with a model whose layers carry a state: what transformers says, also when a worker dies;
constraints and beam searches, which go back over nothing.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from octavo import LLM, Client, Constraint, SamplingParams
from tests.fakes.routers import smollm2_tokenizer
from tests.support.models.families import VOCAB_SIZE, make_model
from tests.support.models.tiny_model import make_tiny_model
from tests.support.up import Up

PROMPT, MAX_TOKENS = [(7 * i) % 97 + 3 for i in range(40)], 80
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("states")
    # A tokenizer; the model's vocabulary has more tokens.
    make_tiny_model(directory / "model")
    make_model("qwen3-next", directory / "model")
    return directory


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[int]:
    reference: Any = make_model("qwen3-next", directory / "reference")
    with torch.inference_mode():
        said = reference.generate(
            torch.tensor([PROMPT]), max_new_tokens=MAX_TOKENS, do_sample=False, eos_token_id=VOCAB_SIZE
        )
    return said[0, len(PROMPT) :].tolist()


@pytest.fixture(scope="module")
def up(directory: Path) -> Iterator[Up]:
    with Up(
        directory,
        f"--model={directory / 'model'}",
        "--dtype=float32",
        "--kv-cache-memory=0.02",
        "--max-num-seqs=16",
        "--max-model-len=128",
        "--data-parallel-size=1",
        real=True,
    ) as up:
        up.wait_for("serving; Ctrl-C to stop")
        yield up


def test_a_killed_worker_costs_no_token(up: Up, expected: list[int]) -> None:
    """The size of blocks is the model's choice, in each process."""
    with Client(f"127.0.0.1:{up.port}", timeout=60) as client:
        assert client.model().block_size > 16
        for _ in range(2):
            assert list(client.generate(PROMPT, GREEDY).choices[0].token_ids) == expected
        worker = up.child("worker")
        with client.stream(PROMPT, GREEDY) as stream:
            for count, _ in enumerate(stream):
                if count == 10:
                    worker.kill()
                    psutil.wait_procs([worker], timeout=10)
        assert list(stream.generation.choices[0].token_ids) == expected


def test_an_engine_in_this_process_says_the_same(directory: Path, expected: list[int]) -> None:
    fields: dict[str, Any] = {"dtype": "float32", "kv_cache_memory": 0.02, "worker_threads": 1, "max_model_len": 128}
    small, large = (LLM(str(directory / "model"), block_size=size, **fields) for size in (8, 64))
    for llm in (small, large):
        for result in llm.generate([PROMPT, PROMPT[:30]], GREEDY)[:1]:
            assert list(result.choices[0].token_ids) == expected
    # Beams go on from others' blocks, and compute what is in none.
    beams = SamplingParams(n=3, max_tokens=20)
    found = [llm.generate([PROMPT], beams, beam_width=3)[0].choices for llm in (small, large)]
    assert [each.token_ids for each in found[0]] == [each.token_ids for each in found[1]]


def test_forced_tokens_are_computed_one_by_one(directory: Path) -> None:
    """Once the first token of the choice is known, all others are; the worker would refuse to verify them as drafts."""
    # Grammars need tokens that are made of bytes: the first of SmolLM2's are.
    tokenizer = str(smollm2_tokenizer().directory)
    llm = LLM(str(directory / "model"), tokenizer=tokenizer, dtype="float32", kv_cache_memory=0.02, worker_threads=1)
    choice = SamplingParams(max_tokens=40, constraint=Constraint(choice=["SUPERCALIFRAGILISTIC"]))
    for result in llm.generate([[20], PROMPT], choice):
        assert result.text == "SUPERCALIFRAGILISTIC"
