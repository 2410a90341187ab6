"""A model on two ranks of a cluster: the same output as one rank's, also when one of the two dies.

`octavo up`, real processes, gloo over loopback; steps are planned ahead, so that some are in flight when the rank dies.
With the settings for one machine the second rank dies, with those for several the first, which holds their store.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from runtime.security.curve import make_keys
from tests.support.models.tiny_model import make_tiny_model
from tests.support.ports import free_ports
from tests.support.streams import say
from tests.support.up import Up

PROMPTS = ["w5 w6 w7", "w9 w8", " ".join(f"w{i}" for i in range(10, 60))]
# The last request is sampled, the others are greedy.
SAMPLING = [
    SamplingParams(temperature=0.8 * (number == 2), seed=number, max_tokens=100, ignore_eos=True)
    for number in range(len(PROMPTS))
]
OPTIONS = {"dtype": "float32", "kv_cache_memory": 0.01, "load_format": "dummy"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[tuple[int, ...]]:
    """The output of one rank."""
    conversations = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    return [each.choices[0].token_ids for each in LLM(str(model), **OPTIONS).generate(conversations, SAMPLING)]


def _over_tcp(directory: Path) -> list[str]:
    make_keys(directory / "keys")
    return [f"--step-addresses=tcp://127.0.0.1:{free_ports(2)}", f"--curve-dir={directory / 'keys'}"]


@pytest.fixture(scope="module", params=["ipc", "tcp"])
def up(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    directory = tmp_path_factory.mktemp("ranks")
    wires = _over_tcp(directory) if request.param == "tcp" else []
    with Up(
        directory,
        f"--model={model}",
        *wires,
        "--tensor-parallel-size=2",
        "--max-num-seqs=8",
        "--max-steps-in-flight=2",
        *(f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()),
        real=True,
    ) as up:
        up.wait_for("serving; Ctrl-C to stop")
        yield up


def _say(up: Up, when_begun: Callable[[], object]) -> list[tuple[int, ...]]:
    return say(up.port, PROMPTS, SAMPLING, when_begun)


def test_two_ranks_say_what_one_says_also_when_one_of_them_dies(
    request: pytest.FixtureRequest, up: Up, expected: list[tuple[int, ...]]
) -> None:
    assert _say(up, lambda: None) == expected
    rank = "0" if request.node.callspec.params["up"] == "tcp" else "1"
    victim = next(each for each in up.children_of("worker") if each.cmdline()[-1] == rank)
    assert _say(up, victim.kill) == expected
    assert not victim.is_running()
    up.wait_for("was killed by SIGKILL; starting it again")
