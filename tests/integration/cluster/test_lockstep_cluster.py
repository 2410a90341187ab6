"""An MoE model on two replicas that share its experts: the same output as one worker's, also after process deaths.

`octavo up`, real processes, gloo over loopback; steps are planned ahead.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from octavo import LLM, SamplingParams
from tests.support.models.tiny_model import make_tiny_model
from tests.support.streams import say
from tests.support.up import Up

MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
PROMPTS = ["w5 w6 w7", "w9 w8", " ".join(f"w{i}" for i in range(10, 60)), "w3"]
# Lengths differ, so that toward the end one replica has nothing to run. The last request is sampled, not greedy.
SAMPLING = [
    SamplingParams(temperature=0.8 * (number == 3), seed=number, max_tokens=90 + 20 * number, ignore_eos=True)
    for number in range(len(PROMPTS))
]
OPTIONS = {"dtype": "float32", "kv_cache_memory": 0.01, "load_format": "dummy"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), **MIXTRAL)


@pytest.fixture(scope="module")
def up(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with Up(
        tmp_path_factory.mktemp("replicas"),
        f"--model={model}",
        "--data-parallel-size=2",
        "--enable-expert-parallel",
        "--max-num-seqs=8",
        "--max-steps-in-flight=2",
        *(f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()),
        real=True,
    ) as up:
        up.wait_for("serving; Ctrl-C to stop")
        yield up


def _process(up: Up, module: str, replica: int) -> psutil.Process:
    def is_of_replica(command: list[str]) -> bool:
        return command[command.index("--replica") + 1] == str(replica)

    return next(each for each in up.children_of(module) if is_of_replica(each.cmdline()))


def _say(up: Up, when_begun: Callable[[], object]) -> list[tuple[int, ...]]:
    return say(up.port, PROMPTS, SAMPLING, when_begun)


def test_two_replicas_say_what_one_worker_says_whatever_dies(up: Up, model: Path) -> None:
    tokens = _say(up, lambda: None)
    conversations = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    alone = LLM(str(model), **OPTIONS).generate(conversations, SAMPLING)
    assert tokens == [each.choices[0].token_ids for each in alone]

    # Kills a worker of replica 1, then the scheduler of replica 0, which coordinates: its streams move to replica 1.
    assert _say(up, _process(up, "worker", 1).kill) == tokens
    up.wait_for("has ended in all replicas: replica 1: rank 0")
    assert _say(up, _process(up, "scheduler", 0).kill) == tokens
    up.wait_for("has ended: the coordinator, in the scheduler of replica 0, has disconnected")
