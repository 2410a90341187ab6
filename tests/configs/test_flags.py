"""The flags of `python -m router | scheduler | worker`: one for every option, from the option's definition."""

from pathlib import Path

import pytest

from configs.flags import own_number, parse_flags, usage
from configs.load import ConfigError, load_options
from configs.options import Options


def test_options_switches_and_own_flags():
    config, flags, own = parse_flags(
        ["-c", "a.yaml", "--max-num-seqs", "4", "--max_model_len=64", "--no-enable-prefix-caching",
         "--disable-log-stats", "--replica", "1", "--rank=0"],
        ("replica", "rank"),
    )  # fmt: skip
    assert config == Path("a.yaml")
    assert flags == {
        "max_num_seqs": "4", "max_model_len": "64", "enable_prefix_caching": False, "disable_log_stats": True,
    }  # fmt: skip
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


def test_usage_tells_every_option():
    text = usage("python -m worker", {"rank": "Its rank."})
    for name in Options.model_fields:
        assert f"--{name.replace('_', '-')}" in text
    assert "--no-enable-prefix-caching" in text
    assert "--rank RANK" in text
