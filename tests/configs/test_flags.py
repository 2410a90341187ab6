"""The flags of `python -m router | scheduler | worker`: one for every option, from the option's definition."""

from pathlib import Path

import pytest

from configs.flags import own_number, parse_flags, usage
from configs.load import ConfigError, load_options
from configs.options import Options
from configs.vllm_names import NAMES, SHORT_FLAGS, SWITCHES


def test_options_switches_and_own_flags():
    config, flags, own = parse_flags(
        [
            "-c",
            "a.yaml",
            "--max-num-seqs",
            "4",
            "--max_model_len=64",
            "--no-enable-prefix-caching",
            "--disable-log-stats",
            "--replica",
            "1",
            "--rank=0",
        ],
        ("replica", "rank"),
    )
    assert config == Path("a.yaml")
    assert flags == {
        "max_num_seqs": "4",
        "max_model_len": "64",
        "enable_prefix_caching": False,
        "disable_log_stats": True,
    }
    assert own == {"replica": "1", "rank": "0"}
    options = load_options(None, flags, {})
    assert (options.max_num_seqs, options.enable_prefix_caching) == (4, False)


def test_a_switch_takes_a_value_after_an_equals_sign_only():
    _, flags, _ = parse_flags(["--enable-prefix-caching=false", "--disable-log-stats", "--port", "0"])
    assert flags == {"enable_prefix_caching": "false", "disable_log_stats": True, "port": "0"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max-num-seq", "4"], "unknown flag --max-num-seq: did you mean --max-num-seqs?"),
        (["--zzz"], "unknown flag --zzz; --help lists them all"),
        # Not a switch, so it has no such form.
        (["--no-max-num-seqs"], "unknown flag --no-max-num-seqs"),
        (["--replica", "1"], "unknown flag --replica"),
        (["--port"], "--port needs a value"),
        (["-c"], "-c needs a value"),
        (["8000"], "'8000' is not a flag"),
    ],
)
def test_a_wrong_flag_is_named(argv: list[str], message: str):
    with pytest.raises(ConfigError) as caught:
        parse_flags(argv)
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["2", "-1", "x", ""])
def test_own_numbers_are_bounded(text: str):
    with pytest.raises(ConfigError, match=r"--rank=.*give a number from 0 to 1"):
        own_number({"rank": text}, "rank", 0, 2)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--nnodes", "2"],
            "nnodes='2': vLLM's option is not one of Octavo's (only 1 is taken). Instead: each machine",
        ),
        (["--node-rank=1"], "`python -m worker --rank R --replica D` starts a worker anywhere"),
        (["--master-addr", "10.0.0.1"], "Instead: ranks find each other through their scheduler: step_addresses"),
        (["--headless"], "headless=True: vLLM's option is not one of Octavo's (only false is taken)"),
        (["--data_parallel_size_local", "2"], "`octavo up` starts all replicas of data_parallel_size on this machine"),
    ],
)
def test_process_groups_by_vllms_names_are_refused_with_what_to_use(argv: list[str], message: str) -> None:
    _, flags, _ = parse_flags(argv)
    with pytest.raises(ConfigError) as caught:
        load_options(None, flags, {})
    assert message in str(caught.value)
    assert "(given as a flag)" in str(caught.value)


def test_process_groups_of_one_machine_ask_for_nothing(tmp_path: Path) -> None:
    _, flags, _ = parse_flags(["--nnodes", "1", "--node-rank", "0", "--headless=false", "--tensor-parallel-size", "2"])
    assert load_options(None, flags, {}) == load_options(None, {"tensor_parallel_size": "2"}, {})
    file = tmp_path / "options.yaml"
    file.write_text("nnodes: 1\nheadless: false\ndata-parallel-backend: mp\n")
    assert load_options(file, {}, {}) == load_options(None, {}, {})
    file.write_text("data_parallel_backend: ray\n")
    with pytest.raises(ConfigError, match="Instead: distributed_executor_backend=ray"):
        load_options(file, {}, {})


def test_vllms_names_are_not_options() -> None:
    """One that becomes an option has to leave the list of those that are refused."""
    assert not set(NAMES) & set(Options.model_fields)
    assert set(SHORT_FLAGS) <= set(Options.model_fields)
    assert set(SWITCHES) <= set(NAMES)


def test_usage_tells_every_option():
    text = usage("python -m worker", {"rank": "Its rank."})
    for name in Options.model_fields:
        assert f"--{name.replace('_', '-')}" in text
    assert "--no-enable-prefix-caching" in text
    assert "--rank RANK" in text
