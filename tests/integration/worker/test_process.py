"""`python -m worker` as a process: real sockets, a tiny model, exit codes, helpful messages."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from configs.load import load_options
from protos import inference_pb2, step_pb2
from runtime.security.curve import make_keys
from tests.fakes.step_scheduler import StepScheduler
from tests.support.ports import free_port, free_ports
from worker.cpu.build import build_cpu_runner
from worker.errors import PermanentError
from worker.process.build import build_runner

ROOT = Path(__file__).parents[2]
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": [2, 3],
    "bos_token_id": 1,
    "tie_word_embeddings": False,
}
GENERATION = {"temperature": 0.5, "top_k": 7, "eos_token_id": 4}
PROMPT = list(range(10, 30))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(TINY))
    (path / "generation_config.json").write_text(json.dumps(GENERATION))
    return path


def flags_of(tmp_path: Path, model: Path | str, **changes: object) -> dict[str, object]:
    flags: dict[str, object] = {
        "model": str(model),
        "load_format": "dummy",
        "dtype": "float32",
        "num_blocks_override": 40,
        "max_num_seqs": 4,
        "block_size": 8,
        "worker_threads": 1,
        "metrics_port": 0,
        "step_addresses": f"ipc://{tmp_path}/step.sock",
    }
    return {**flags, **changes}


Spawn = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Starts workers; kills those that still run at the end."""
    with ExitStack() as stack:

        def spawn(flags: dict[str, object], *more: str) -> subprocess.Popen[str]:
            arguments = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
            environment = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_")}
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "worker", *arguments, *more],
                    cwd=ROOT,
                    env=environment,
                    stderr=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(process.kill)
            return process

        yield spawn


def last_words(process: subprocess.Popen[str], code: int) -> str:
    _, errors = process.communicate(timeout=120)
    assert process.returncode == code, errors
    assert "Traceback" not in errors
    return errors


def plans() -> list[step_pb2.StepPlan]:
    sampled = inference_pb2.SamplingParams(temperature=1.0, top_p=0.9, seed=5, logprobs=2, prompt_logprobs=1)
    greedy = inference_pb2.SamplingParams(temperature=0.0, repetition_penalty=1.3)
    one = step_pb2.NewRow(
        row=0, sequence=1, token_ids=PROMPT, num_prompt_tokens=20, block_ids=[1, 2, 3, 4], sampling=sampled
    )
    two = step_pb2.NewRow(row=2, sequence=2, token_ids=[7, 8], num_prompt_tokens=2, block_ids=[9, 5], sampling=greedy)
    return [
        step_pb2.StepPlan(new_rows=[one], rows=[0], num_tokens=[12]),
        step_pb2.StepPlan(new_rows=[two], rows=[2, 0], num_tokens=[2, 8]),
        *[step_pb2.StepPlan(rows=[0, 2], num_tokens=[1, 1]) for _ in range(5)],
        step_pb2.StepPlan(freed_rows=[0], rows=[2], num_tokens=[1]),
    ]


def without_timing(result: step_pb2.StepResult, **changes: int) -> step_pb2.StepResult:
    result.ClearField("timing")
    for name, value in changes.items():
        setattr(result, name, value)
    return result


def test_a_worker_process_computes_what_the_runner_computes(
    tmp_path: Path, model: Path, spawn: Spawn, caplog: pytest.LogCaptureFixture
):
    flags = flags_of(tmp_path, model)
    worker = spawn(flags)
    with StepScheduler(f"ipc://{tmp_path}/step.sock") as scheduler:
        identity, hello = scheduler.expect_hello()
        assert (hello.model, hello.block_size, hello.max_num_seqs) == ("tiny", 8, 4)
        assert hello.pid == worker.pid
        info = scheduler.reset(1, identity).model
        assert (info.name, info.architecture, info.dtype) == ("tiny", "LlamaForCausalLM", "float32")
        assert info.quantization == "none"
        # 40 blocks of 8 tokens hold more than the model's 256.
        assert (info.num_blocks, info.block_size, info.max_model_len) == (40, 8, 256)
        assert (info.vocab_size, list(info.eos_token_ids)) == (128, [2, 3, 4])
        assert info.default_sampling == inference_pb2.SamplingParams(temperature=0.5, top_k=7)
        assert len(info.fingerprint) == 16
        with caplog.at_level("INFO", "octavo.worker"):
            direct = build_cpu_runner(load_options(flags=flags, environ={}))
        assert "defaults of sampling: temperature=0.5, top_k=7" in caplog.text
        for step, plan in enumerate(plans(), 1):
            expected = without_timing(direct.execute(plan), epoch=1, step=step)
            assert without_timing(scheduler.step(plan)) == expected
        worker.send_signal(signal.SIGTERM)
        last_words(worker, 0)


def test_stop_signals_do_not_change_the_exit_code_of_a_worker_that_ends(tmp_path: Path, model: Path, spawn: Spawn):
    """Python restores the default actions of signals before it ends."""
    worker = spawn(flags_of(tmp_path, model))
    with StepScheduler(f"ipc://{tmp_path}/step.sock") as scheduler:
        scheduler.join()
        scheduler.send(step_pb2.SchedulerToWorker(shutdown=step_pb2.Shutdown()))
        while worker.poll() is None:
            worker.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(0.001)
        last_words(worker, 0)


def test_curve_keys_on_tcp(tmp_path: Path, model: Path, spawn: Spawn):
    keys, strange = tmp_path / "keys", tmp_path / "strange"
    make_keys(keys)
    make_keys(strange)
    port = free_ports(2)
    flags = flags_of(tmp_path, model, step_addresses=f"tcp://127.0.0.1:{port}")
    with StepScheduler(f"tcp://127.0.0.1:{port}", curve_dir=keys) as scheduler:
        # No message of a worker whose key is not on the list gets through: the only Hello is the other worker's.
        stranger = spawn({**flags, "curve_dir": strange})
        worker = spawn({**flags, "curve_dir": keys})
        identity, hello = scheduler.expect_hello()
        assert hello.pid == worker.pid
        scheduler.reset(1, identity)
        assert scheduler.step(plans()[0]).prompt_logprobs
        scheduler.heartbeats.wait_for(lambda beat: beat.state == step_pb2.WORKER_STATE_IDLE)
        assert {beat.instance for beat in scheduler.heartbeats.received} == {hello.instance}
        for process in (worker, stranger):
            process.send_signal(signal.SIGINT)
            last_words(process, 0)


def test_health_and_metrics_over_http(tmp_path: Path, model: Path, spawn: Spawn):
    port = free_port()
    # Ports go up from metrics_port: the router, one scheduler, this worker.
    worker = spawn(flags_of(tmp_path, model, metrics_port=port - 2))
    with StepScheduler(f"ipc://{tmp_path}/step.sock") as scheduler:
        scheduler.join(epoch=6)
        scheduler.step(plans()[0])
        # The result is sent shortly before the step ends.
        scheduler.heartbeats.wait_for(lambda beat: beat.step == 1 and beat.state == step_pb2.WORKER_STATE_IDLE)
        health = urllib.request.urlopen(f"http://127.0.0.1:{port}/health").read().decode()
        assert health.strip() == "idle, epoch 6, step 1"
        metrics = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
        assert "octavo_worker_tokens_total 12.0" in metrics
        taken = spawn(flags_of(tmp_path, model, metrics_port=port - 2))
        assert f"cannot listen on 127.0.0.1:{port}" in last_words(taken, 2)
        worker.send_signal(signal.SIGTERM)
        last_words(worker, 0)


def test_a_damaged_file_is_named_to_scheduler_and_person(tmp_path: Path, spawn: Spawn):
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + b"\xff" * 100)
    worker = spawn(flags_of(tmp_path, damaged, load_format="auto"))
    with StepScheduler(f"ipc://{tmp_path}/step.sock") as scheduler:
        identity, _ = scheduler.expect_hello()
        scheduler.send_reset(1, identity)
        failure = scheduler.expect("failure")
        assert failure.permanent
        assert "damaged.gguf" in failure.message
        assert "damaged.gguf" in last_words(worker, 2)


def test_a_model_that_is_not_there_is_told_before_anything_is_loaded(tmp_path: Path, spawn: Spawn):
    worker = spawn(flags_of(tmp_path, tmp_path / "nothing.gguf"))
    with StepScheduler(f"ipc://{tmp_path}/step.sock") as scheduler:
        failure = scheduler.expect("failure")
        assert failure.permanent
        assert "nothing.gguf" in failure.message
        assert "no such file" in last_words(worker, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-num-sequences", "4"], "unknown flag --max-num-sequences: did you mean --max-num-seqs?"),
        (["--block-size=12"], "block_size=12 as a flag: Input should be 8, 16, 32, 64, 128, 256, 512 or 1024"),
        (["--rank", "1"], "--rank='1': give a number from 0 to 0"),
        (["--replica", "-1"], "--replica='-1'"),
        (["-c", "nowhere.yaml"], "cannot read the configuration nowhere.yaml"),
    ],
)
def test_bad_flags_are_named(spawn: Spawn, arguments: list[str], message: str):
    assert message in last_words(spawn({}, *arguments), 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_model_len": 300}, "max_model_len=300 is beyond the model's context length: use 256 or less"),
        ({"max_model_len": 200, "num_blocks_override": 20}, "use 160 or less, or raise num_blocks_override=20"),
        ({"num_blocks_override": 0, "kv_cache_memory": 1e-6}, "kv_cache_memory"),
    ],
)
def test_a_kv_cache_that_does_not_fit_is_named(tmp_path: Path, model: Path, changes: dict, message: str):
    with pytest.raises((PermanentError, ValueError), match=message):
        build_runner(load_options(flags=flags_of(tmp_path, model, **changes), environ={}))


def test_max_model_len_is_lowered_to_what_the_cache_holds(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
):
    runner = build_runner(load_options(flags=flags_of(tmp_path, model, num_blocks_override=20), environ={}))
    assert runner.model_info.max_model_len == 160
    assert "max_model_len is 160, not the model's 256" in caplog.text


def test_equal_options_give_equal_fingerprints_and_other_numbers_another(tmp_path: Path, model: Path):
    def fingerprint(**changes: object) -> str:
        return build_runner(load_options(flags=flags_of(tmp_path, model, **changes), environ={})).model_info.fingerprint

    assert fingerprint() == fingerprint(max_num_seqs=2, block_size=16)
    others = [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4"}]
    assert len({fingerprint(), *(fingerprint(**each) for each in others)}) == 4
    assert fingerprint() == fingerprint(quantization="none"), "auto must resolve to none here"
