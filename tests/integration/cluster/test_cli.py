"""The `octavo` command as users type it, against a router that stands in for the real one."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.options import Options
from tests.support.ports import free_port
from tests.support.up import COMMAND, Up, environment


def octavo(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*COMMAND, *arguments], env=environment(), capture_output=True, text=True, check=False, timeout=120
    )


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with Up(tmp_path_factory.mktemp("cli")) as up:
        up.wait_until_serving()
        yield f"127.0.0.1:{up.port}"


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_an_answer_is_on_stdout_and_the_usage_on_stderr(target: str, command: str) -> None:
    result = octavo(command, "Capital of France?", "--target", target, "--temperature", "0")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "Paris, of course\n"
    assert result.stderr == "(2 prompt tokens, 1 of them cached, 3 output tokens; ended by stop)\n"


def test_without_a_cluster_it_says_how_to_start_one() -> None:
    result = octavo("chat", "hi", "--target", f"127.0.0.1:{free_port()}")
    assert result.returncode == 1
    assert "start one with `octavo up`" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_error_of_the_server_is_shown_in_its_own_words(target: str) -> None:
    result = octavo("complete", "hi", "--target", target, "--model", "nonesuch")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "octavo: model='nonesuch' is not served here; 'fake' is\n"


def test_a_running_cluster_is_measured(target: str) -> None:
    result = octavo(
        "bench",
        "serve",
        "--target",
        target,
        "--num-requests=8",
        "--request-rate=200",
        "--concurrency=4",
        "--prompt-len=5",
        "--output-len=6",
        "--json",
    )
    assert result.returncode == 0, result.stderr
    (line,) = result.stdout.splitlines()
    report = json.loads(line)
    expected = {
        "engine": "octavo",
        "model": "fake",
        "dtype": "float32",
        "concurrency": 4,
        "prompt_len": 5,
        "output_len": 6,
        "num_requests": 8,
        "num_errors": 0,
        "request_rate": 200.0,
    }
    assert expected.items() <= report.items()
    for key in ("ttft_s", "itl_ms", "e2e_s"):
        assert 0 < report[f"{key}_p50"] <= report[f"{key}_p90"] <= report[f"{key}_p99"]
    assert report["output_tok_s"] == pytest.approx(8 * 6 / report["duration_s"], rel=1e-2)


def test_a_person_gets_a_table(target: str) -> None:
    result = octavo("bench", "serve", "--target", target, "--num-requests=2", "--output-len=4", "--prompt-len=4")
    assert result.returncode == 0, result.stderr
    assert "fake, float32, 4 in / 4 out" in result.stdout
    assert "output_tok_s" in result.stdout
    assert "itl_ms_p99" in result.stdout


def test_rates_are_measured_in_turn_and_drawn(target: str, tmp_path: Path) -> None:
    result = octavo(
        "bench",
        "serve",
        "--target",
        target,
        "--num-requests=6",
        "--request-rate=50,100,inf",
        "--json",
        "--dataset=prefixes",
        "--prefix-len=4",
        "--prompt-len=uniform:6:9",
        "--output-len=5",
        "--goodput=ttft:60000",
        "--burstiness=0.5",
        "--plot",
        str(tmp_path / "rates.svg"),
    )
    assert result.returncode == 0, result.stderr
    reports = [json.loads(line) for line in result.stdout.splitlines()]
    assert [report["request_rate"] for report in reports] == [50.0, 100.0, "inf"]
    for report in reports:
        assert {"dataset": "prefixes", "good_share": 1.0, "burstiness": 0.5, "output_len": 5}.items() <= report.items()
    assert "goodput_requests_s" in (tmp_path / "rates.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--dataset=sharegpt",), "--dataset sharegpt needs a file"),
        (("--ramp-up=linear",), "--ramp-up goes with a --ramp-to"),
        (("--burstiness=0",), "0 is not above 0"),
        (("--request-rate=0",), "0 is not above 0"),
        (("--prompt-len=60", "--output-len=60"), "exceed max_model_len=64"),
    ],
)
def test_a_load_that_cannot_be_is_refused(target: str, arguments: tuple[str, ...], words: str) -> None:
    result = octavo("bench", "serve", "--target", target, *arguments)
    assert result.returncode != 0
    assert words in result.stderr


def test_the_help_of_up_shows_every_option_with_its_default_and_range() -> None:
    result = octavo("up", "--help")
    assert result.returncode == 0
    for name in Options.model_fields:
        assert f"--{name.replace('_', '-')}" in result.stdout
    assert "(default 256; from 1 up to 65,536)" in result.stdout
    assert "8|16|32" in result.stdout
    assert "KV cache" in result.stdout


def test_keys_are_made_once(tmp_path: Path) -> None:
    assert octavo("keys", str(tmp_path / "keys")).returncode == 0
    assert (tmp_path / "keys" / "scheduler.key_secret").exists()
    again = octavo("keys", str(tmp_path / "keys"))
    assert again.returncode == 2
    assert "holds keys already" in again.stderr


def test_the_version_names_what_results_depend_on() -> None:
    result = octavo("version")
    assert {line.split()[0] for line in result.stdout.splitlines()} >= {"octavo", "torch", "transformers"}
