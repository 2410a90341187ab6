"""A model in two stages of two ranks each: the same output as one rank's, also if a stage loses a rank in mid-stream.

`octavo up`, real processes, gloo over loopback; three steps are in flight, the default for two stages.
`python -m benchmarks.parallel.pipeline` does the same with SmolLM2.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from tests.support.models.tiny_model import make_tiny_model
from tests.support.streams import say
from tests.support.up import Up

PROMPTS = ["w5 w6 w7", "w9 w8", " ".join(f"w{i}" for i in range(10, 60)), "w11"]
# Two requests are sampled, two are greedy.
SAMPLING = [
    SamplingParams(temperature=0.8 * (number >= 2), seed=number, max_tokens=100, ignore_eos=True)
    for number in range(len(PROMPTS))
]
OPTIONS = {"dtype": "float32", "kv_cache_memory": 0.01, "load_format": "dummy"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def up(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with Up(
        tmp_path_factory.mktemp("stages"),
        f"--model={model}",
        "--tensor-parallel-size=2",
        "--pipeline-parallel-size=2",
        "--max-num-seqs=8",
        *(f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()),
        real=True,
    ) as up:
        up.wait_for("serving; Ctrl-C to stop")
        yield up


def test_stages_say_what_one_rank_says_also_when_one_of_theirs_dies(up: Up, model: Path) -> None:
    conversations = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    expected = [each.choices[0].token_ids for each in LLM(str(model), **OPTIONS).generate(conversations, SAMPLING)]
    assert say(up.port, PROMPTS, SAMPLING, lambda: None) == expected
    # First a rank of the first stage, for which its rank 0 and the next stage wait; then the rank that returns results.
    for rank in (1, 2):
        victim = next(each for each in up.children_of("worker") if each.cmdline()[-1] == str(rank))
        assert say(up.port, PROMPTS, SAMPLING, victim.kill) == expected
        assert not victim.is_running()
        up.wait_for("was killed by SIGKILL; starting it again")
