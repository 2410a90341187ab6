"""`octavo.LLM` with several workers: processes that it starts, the outputs of one worker, and nothing left behind."""

import os
import signal
import socket
import threading
from pathlib import Path

import psutil
import pytest

from octavo import LLM, Generation, InvalidRequest, SamplingParams
from octavo.cluster.errors import ClusterError
from octavo.local.own_cluster import Workers
from tests.support.models.tiny_model import make_tiny_model

PROMPTS = ["w5 w6 w7", "w9 w8", " ".join(f"w{i}" for i in range(10, 60)), [3, 4, 5]]
# The last request is sampled, and has several outputs; the others are greedy.
SAMPLING = [
    SamplingParams(temperature=0.8 * (number == 3), seed=number, n=1 + (number == 3), max_tokens=100, ignore_eos=True)
    for number in range(len(PROMPTS))
]
OPTIONS = {"dtype": "float32", "kv_cache_memory": 0.01, "load_format": "dummy", "max_num_seqs": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[tuple[int, ...]]]:
    """The output of one worker, in this process."""
    return token_ids(LLM(str(model), **OPTIONS).generate(PROMPTS, SAMPLING))


def token_ids(results: list[Generation]) -> list[list[tuple[int, ...]]]:
    return [[choice.token_ids for choice in result.choices] for result in results]


def workers_of(llm: LLM) -> Workers:
    assert isinstance(llm._computes, Workers)
    return llm._computes


@pytest.mark.parametrize("option", ["tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"])
def test_two_workers_say_what_one_says(option: str, model: Path, expected: list[list[tuple[int, ...]]]) -> None:
    restarts = 0 if option == "pipeline_parallel_size" else 5
    with LLM(str(model), **OPTIONS, **{option: 2}, max_restarts=restarts) as llm:
        processes = [psutil.Process(pid) for pid in workers_of(llm).pids.values()]
        assert sum(name.startswith("worker") for name in workers_of(llm).pids) == 2
        assert token_ids(llm.generate(PROMPTS, SAMPLING)) == expected
        if option == "tensor_parallel_size":
            check_refusals(llm, expected)
            check_death(llm, expected)
            processes += [psutil.Process(pid) for pid in workers_of(llm).pids.values()]
        if option == "pipeline_parallel_size":
            check_death_for_good(llm)
    assert not [each for each in processes if each.is_running()]
    llm.close()


def check_refusals(llm: LLM, expected: list[list[tuple[int, ...]]]) -> None:
    assert llm.num_preemptions == 0
    with pytest.raises(InvalidRequest, match="max_tokens=1000"):
        llm.generate([*PROMPTS, "w5"], [*SAMPLING, SamplingParams(max_tokens=1000)])
    assert llm.chat("w5 w6 w7", SAMPLING[0]).choices[0].token_ids == expected[0][0]
    assert len(llm.generate("w5", SamplingParams(max_tokens=4, n=2), beam_width=2)[0].choices) == 2


def check_death(llm: LLM, expected: list[list[tuple[int, ...]]]) -> None:
    """A worker dies while its LLM computes: another one takes its place, and no output changes."""
    found: list[list[tuple[int, ...]]] = []
    computing = threading.Thread(target=lambda: found.extend(token_ids(llm.generate(PROMPTS, SAMPLING))))
    victim = workers_of(llm).pids["worker 0.1"]
    computing.start()
    os.kill(victim, signal.SIGKILL)
    computing.join()
    assert found == expected
    assert workers_of(llm).pids["worker 0.1"] != victim


def check_death_for_good(llm: LLM) -> None:
    """Nothing may take its place: that is an error, now and later, and not an endless wait."""
    os.kill(workers_of(llm).pids["worker 0.1"], signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(ClusterError, match=r"worker 0\.1 was killed by SIGKILL(.|\n)*max_restarts=0"):
            llm.generate(PROMPTS, SAMPLING)


def test_a_port_that_is_taken_is_an_error_that_leaves_nothing(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ClusterError, match=r"port \d+ .* is in use"):
        LLM(str(model), **OPTIONS, data_parallel_size=2, port=taken.getsockname()[1])
    assert "octavo-cluster" not in {thread.name for thread in threading.enumerate()}


def test_an_llm_has_no_keys(model: Path) -> None:
    with pytest.raises(ValueError, match=r"api_keys_file='keys\.yaml'.*octavo up"):
        LLM(str(model), **OPTIONS, data_parallel_size=2, api_keys_file="keys.yaml")


def test_an_llm_starts_no_ray_cluster(model: Path) -> None:
    with pytest.raises(ValueError, match=r"distributed_executor_backend='ray': .*octavo up --on ray"):
        LLM(str(model), **OPTIONS, data_parallel_size=2, distributed_executor_backend="ray")
