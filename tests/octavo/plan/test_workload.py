"""Lengths, arrivals and prefixes of a simulated workload; and errors about malformed files."""

from pathlib import Path

import numpy as np
import pytest

from octavo.lab.errors import PlanError
from octavo.plan.workload import Workload, parse_lengths, read_arrivals, synthesize


def lengths(text: str, count: int = 4000) -> np.ndarray:
    return parse_lengths(text, "--prompt-len")(np.random.default_rng(0), count)


def test_distributions_have_the_parameters_asked_for() -> None:
    assert set(lengths("37")) == set(lengths("fixed:37")) == {37}
    uniform = lengths("uniform:10:12")
    assert set(uniform) == {10, 11, 12}
    lognormal = lengths("lognormal:256:0.5", 50_000)
    assert lognormal.mean() == pytest.approx(256, rel=0.02)
    assert np.log(lognormal).std() == pytest.approx(0.5, rel=0.02)
    assert lognormal.min() >= 1


@pytest.mark.parametrize("text", ["", "0", "-3", "x", "uniform:5", "uniform:9:5", "lognormal:10", "normal:1:2", "1:2"])
def test_what_is_no_distribution_is_said(text: str) -> None:
    with pytest.raises(PlanError, match=r"--prompt-len=.*uniform:LOW:HIGH"):
        parse_lengths(text, "--prompt-len")


def made(**changes) -> Workload:
    values = {
        "num_requests": 500,
        "rate": 5.0,
        "concurrency": 0,
        "max_model_len": 300,
        "prompt_len": parse_lengths("100", "p"),
        "output_len": parse_lengths("10", "o"),
    }
    return synthesize(**(values | changes))


def test_arrivals_have_the_rate_and_the_seed_decides() -> None:
    assert made().arrivals[-1] == pytest.approx(100, rel=0.15)
    assert (made(rate=float("inf")).arrivals == 0).all()
    np.testing.assert_array_equal(made(seed=1).arrivals, made(seed=1).arrivals)
    assert (made(seed=1).arrivals != made(seed=2).arrivals).any()


def test_drawn_lengths_are_cut_to_what_the_model_takes() -> None:
    requests = made(prompt_len=parse_lengths("uniform:1:400", "p"), output_len=parse_lengths("uniform:1:400", "o"))
    assert (requests.prompt_lens + requests.output_lens <= 300).all()
    assert requests.output_lens.min() >= 1


def test_prompts_are_equal_exactly_where_they_share_a_prefix() -> None:
    requests = made(shared_prefix=0.4, num_prefixes=2)
    of_prefix = [np.flatnonzero(requests.prefix_ids == prefix)[:2] for prefix in (0, 1)]
    (a, b), (c, _) = of_prefix
    assert requests.prompt(a)[:40] == requests.prompt(b)[:40]
    assert requests.prompt(a)[40] != requests.prompt(b)[40]
    assert requests.prompt(a)[0] != requests.prompt(c)[0]
    assert len(requests.prompt(a)) == 100
    alone = made()
    assert alone.prompt(0)[0] != alone.prompt(1)[0]


def write(path: Path, text: str) -> Path:
    path = path / "arrivals.csv"
    path.write_text(text)
    return path


def test_a_file_of_arrivals_is_read_in_order_of_time(tmp_path: Path) -> None:
    text = "arrival_s,prompt_len,output_len,prefix_id\n2.5,80,5,chat\n0,100,7,chat\n1,50,6,\n"
    requests = read_arrivals(write(tmp_path, text))
    assert requests.arrivals.tolist() == [0.0, 1.0, 2.5]
    assert requests.prompt_lens.tolist() == [100, 50, 80]
    assert requests.output_lens.tolist() == [7, 6, 5]
    # A prefix is as long as its shortest prompt, less that prompt's last token.
    assert requests.prefix_lens.tolist() == [79, 0, 79]
    assert read_arrivals(write(tmp_path, text), shared_prefix=0.5).prefix_lens.tolist() == [50, 0, 40]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: the columns are ''"),
        ("arrival,prompt_len,output_len\n", "line 1: the columns are 'arrival,prompt_len,output_len'"),
        ("arrival_s,prompt_len,output_len\n", "holds no request"),
        ("arrival_s,prompt_len,output_len\n0,8,4\n1,8\n", "line 3: 2 values, but the header names 3 columns"),
        ("arrival_s,prompt_len,output_len\n-1,8,4\n", "line 2: arrival_s='-1' is not a number of seconds"),
        ("arrival_s,prompt_len,output_len\nnan,8,4\n", "line 2: arrival_s='nan'"),
        ("arrival_s,prompt_len,output_len\n0,8.5,4\n", "line 2: prompt_len='8.5' is not a number of tokens"),
        ("arrival_s,prompt_len,output_len\n0,8,0\n", "line 2: output_len='0' is not a number of tokens"),
    ],
)
def test_a_bad_file_is_said_with_the_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        read_arrivals(write(tmp_path, text))


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"cannot read .*none\.csv: No such file"):
        read_arrivals(tmp_path / "none.csv")
