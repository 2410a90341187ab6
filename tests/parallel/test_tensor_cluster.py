"""A model on two ranks of a cluster: what one rank says, also when one of the two dies.

`octavo up`, real processes, gloo over loopback; steps are planned ahead, so that some are in flight when the rank dies.
`python -m benchmarks.tensor_parallel` does the same with SmolLM2 on three ranks.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from tests.support.streams import say
from tests.support.tiny_model import make_tiny_model
from tests.support.up import Up

PROMPTS = ["w5 w6 w7", "w9 w8", " ".join(f"w{i}" for i in range(10, 60))]
# The last one is drawn.
SAMPLING = [
    SamplingParams(temperature=0.8 * (number == 2), seed=number, max_tokens=100, ignore_eos=True)
    for number in range(len(PROMPTS))
]
OPTIONS = {"dtype": "float32", "kv_cache_memory": 0.01, "load_format": "dummy"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def up(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with Up(
        tmp_path_factory.mktemp("ranks"), f"--model={model}", "--tensor-parallel-size=2", "--max-num-seqs=8",
        "--max-steps-in-flight=2", *(f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()),
        real=True,
    ) as up:  # fmt: skip
        up.wait_for("serving; Ctrl-C to stop")
        yield up


def _say(up: Up, when_begun: Callable[[], object]) -> list[tuple[int, ...]]:
    return say(up.port, PROMPTS, SAMPLING, when_begun)


def test_two_ranks_say_what_one_says_also_when_one_of_them_dies(up: Up, model: Path) -> None:
    tokens = _say(up, lambda: None)
    conversations = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    alone = LLM(str(model), **OPTIONS).generate(conversations, SAMPLING)
    assert tokens == [each.choices[0].token_ids for each in alone]

    victim = next(each for each in up.children_of("worker") if each.cmdline()[-1] == "1")
    assert _say(up, victim.kill) == tokens
    assert not victim.is_running()
    up.wait_for("was killed by SIGKILL; starting it again")
