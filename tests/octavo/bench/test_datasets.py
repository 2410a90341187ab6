"""Datasets of benchmarks: lengths, shared beginnings, files and their errors; arrivals and goodput."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.load import ConfigError
from octavo.bench.arrivals import Arrivals
from octavo.bench.datasets.chosen import choose
from octavo.bench.datasets.request import BenchRequest, DatasetError
from octavo.bench.goodput import RequestLimits, parse_limits
from octavo.lab.flags import DatasetKind, LoadFlags, Ramp
from octavo.reports import RequestTrace
from tests.support.scheduler.plan import load, record, settings


def requests(count: int = 50, *, seed: int = 0, as_text: bool = False, **query: Any) -> list[BenchRequest]:
    return choose(LoadFlags(**query)).requests(count, seed, vocab_size=1000, as_text=as_text)


def write(path: Path, *entries: object) -> Path:
    path.write_text("\n".join(map(json.dumps, entries)))
    return path


def common(first: Any, second: Any) -> int:
    """Length of the common beginning."""
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


@pytest.mark.parametrize("as_text", [False, True], ids=["ids", "text"])
def test_random_prompts_have_lengths_of_the_range_and_share_nothing(as_text: bool) -> None:
    found = requests(prompt_len="uniform:20:40", output_len="uniform:5:9", as_text=as_text)
    assert {each.prompt_len for each in found} <= set(range(20, 41))
    assert {each.output_len for each in found} == set(range(5, 10))
    prompts = [each.prompt.split() if isinstance(each.prompt, str) else each.prompt for each in found]
    assert [len(prompt) for prompt in prompts] == [each.prompt_len for each in found]
    assert max(common(a, b) for a, b in pairwise(prompts)) < 5
    assert found == requests(prompt_len="uniform:20:40", output_len="uniform:5:9", as_text=as_text)


@pytest.mark.parametrize("as_text", [False, True], ids=["ids", "text"])
def test_lognormal_lengths_are_whole_numbers(as_text: bool) -> None:
    for each in requests(prompt_len="lognormal:40:0.8", output_len="lognormal:20:0.8", as_text=as_text):
        assert len(each.prompt.split() if isinstance(each.prompt, str) else each.prompt) == each.prompt_len
        assert isinstance(each.output_len, int)


@pytest.mark.parametrize("as_text", [False, True], ids=["ids", "text"])
def test_prompts_with_prefixes_share_one_of_them_and_no_more(as_text: bool) -> None:
    found = requests(
        dataset=DatasetKind.PREFIXES, prefix_len=30, num_prefixes=3, prompt_len="uniform:40:50", as_text=as_text
    )
    prompts = [each.prompt.split() if isinstance(each.prompt, str) else each.prompt for each in found]
    beginnings = {tuple(prompt[:30]) for prompt in prompts}
    assert len(beginnings) == 3
    assert all(common(a, b) < 36 for i, a in enumerate(prompts) for b in prompts[:i])
    with pytest.raises(DatasetError, match="--prefix-len=30 leaves no token for a prompt of 30"):
        requests(dataset=DatasetKind.PREFIXES, prefix_len=30, prompt_len="30")


def test_conversations_are_read_in_all_forms(tmp_path: Path) -> None:
    entries = [
        {"conversations": [{"from": "human", "value": "a" * 40}, {"from": "gpt", "value": "b" * 80}]},
        {"messages": [{"role": "user", "content": "c" * 60}, {"role": "assistant", "content": "d" * 20}]},
        {"prompt": "e" * 20, "output_tokens": 7},
        # Too short to measure.
        {"prompt": "hi", "output_tokens": 7},
    ]
    lines = write(tmp_path / "a.jsonl", *entries)
    (tmp_path / "b.json").write_text(json.dumps(entries))
    for path in (lines, tmp_path / "b.json"):
        found = requests(dataset=DatasetKind.SHAREGPT, dataset_path=path)
        assert sorted((len(str(each.prompt)), each.prompt_len, each.output_len) for each in found) == [
            (20, 5, 7),
            (40, 10, 20),
            (60, 15, 5),
        ]
    conversations: dict[str, Any] = {"dataset": DatasetKind.SHAREGPT, "dataset_path": lines}
    assert {each.output_len for each in requests(**conversations, output_len="9")} == {9}
    # In an order of the seed, of which `count` takes the first ones.
    orders = {tuple(str(each.prompt)[0] for each in requests(seed=seed, **conversations)) for seed in range(9)}
    assert len(orders) > 1
    assert len(requests(2, **conversations)) == 2


def test_a_trace_with_timestamps_keeps_times_lengths_and_shared_blocks(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl",
        {"timestamp": 4000, "input_length": 1100, "output_length": 50, "hash_ids": [1, 2, 9]},
        {"timestamp": 1000, "input_length": 1024, "output_length": 10, "hash_ids": [1, 2]},
        {"timestamp": 1500, "input_length": 600, "output_length": 20, "hash_ids": [1, 5]},
        {"timestamp": 9000, "input_length": 30, "output_length": 20},
    )
    first, second, third, last = requests(dataset=DatasetKind.MOONCAKE, dataset_path=path)
    assert [each.at for each in (first, second, third, last)] == [0.0, 0.5, 3.0, 8.0]
    assert [len(each.prompt) for each in (first, second, third, last)] == [1024, 600, 1100, 30]
    assert common(first.prompt, third.prompt) == 1024
    assert 512 <= common(first.prompt, second.prompt) < 520
    small = requests(dataset=DatasetKind.MOONCAKE, dataset_path=path, length_scale=0.125)
    assert [(each.prompt_len, each.output_len) for each in small] == [(128, 1), (75, 2), (138, 6), (4, 2)]
    assert common(small[0].prompt, small[2].prompt) == 128
    texts = requests(dataset=DatasetKind.MOONCAKE, dataset_path=path, as_text=True)
    assert [len(str(each.prompt).split()) for each in texts] == [1024, 600, 1100, 30]


def test_a_recorded_trace_is_sent_as_it_was_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = load()
    record(tmp_path / "a.trace", monkeypatch, workload, settings())
    found = requests(10, dataset=DatasetKind.TRACE, dataset_path=tmp_path / "a.trace")
    assert [tuple(each.prompt) for each in found] == [workload.prompt(i) for i in range(10)]
    assert [each.output_len for each in found] == workload.output_lens[:10].tolist()
    np.testing.assert_allclose(
        [each.at or 0.0 for each in found], workload.arrivals[:10] - workload.arrivals[0], atol=1e-6
    )
    with pytest.raises(DatasetError, match="token ids and no text"):
        requests(dataset=DatasetKind.TRACE, dataset_path=tmp_path / "a.trace", as_text=True)


@pytest.mark.parametrize(
    ("line", "words"),
    [("{", "line 2 is not valid JSON"), ('{"prompt": 3}', "line 2 is none of the known forms")],
)
def test_an_error_names_file_and_line(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "x").write_text('{"prompt": "a long prompt", "output_tokens": 5}\n' + line)
    with pytest.raises(DatasetError, match=rf"x, {words}"):
        requests(dataset=DatasetKind.SHAREGPT, dataset_path=tmp_path / "x")


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"dataset": DatasetKind.SHAREGPT}, "--dataset sharegpt needs a file"),
        ({"dataset_path": Path("x")}, "--dataset random takes no file"),
        ({"prefix_len": 5}, "--prefix-len and --dataset prefixes go together"),
        ({"length_scale": 0.5}, "needs --dataset mooncake"),
        ({"length_scale": 0.0}, "--length-scale=0 is not above 0"),
        ({"burstiness": math.inf}, "--burstiness=inf is not above 0"),
        ({"prompt_len": "nine"}, "--prompt-len='nine'"),
        ({"dataset": DatasetKind.SHAREGPT, "dataset_path": Path("nowhere")}, "cannot read nowhere"),
    ],
)
def test_flags_that_do_not_go_together_are_named(query: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        requests(**query)


def test_bursts_keep_the_rate() -> None:
    spreads = {}
    for shape in (0.25, 1.0, 4.0):
        gaps = np.diff(Arrivals(rate=8.0, burstiness=shape).times(4000, seed=1))
        # The mean of 4000 gaps of shape 0.25 is within 3.2% in one standard deviation.
        assert np.mean(gaps) == pytest.approx(1 / 8, rel=0.1)
        spreads[shape] = np.std(gaps) / np.mean(gaps)
    for shape, spread in spreads.items():
        assert spread == pytest.approx(shape**-0.5, rel=0.1)


def test_a_ramp_goes_from_one_rate_to_the_other() -> None:
    for ramp, middle in ((Ramp.LINEAR, 11.0), (Ramp.EXPONENTIAL, 40**0.5)):
        times = np.array(Arrivals(rate=2.0, ramp=ramp, ramp_to=20.0, burstiness=1e6).times(1001, seed=1))
        gaps = np.diff(times)
        assert [1 / gaps[0], 1 / gaps[500], 1 / gaps[-1]] == pytest.approx([2.0, middle, 20.0], rel=0.02)


def trace(began: float, *token_times: float, error: str = "") -> RequestTrace:
    return RequestTrace(
        began=began,
        token_times=[*token_times],
        token_counts=[1] * len(token_times),
        ended=token_times[-1] if token_times else began,
        error=error,
    )


def test_goodput_counts_requests_within_every_limit() -> None:
    traces = [
        trace(0.0, 0.1, 0.2, 0.3),  # good
        trace(0.0, 0.6, 0.7, 0.8),  # a late first token
        trace(0.0, 0.1, 0.2, 0.5),  # a long gap, and 0.2 s a token
        trace(0.0, 0.1, error="lost"),
        trace(0.0, error="lost"),
    ]
    assert parse_limits(["ttft:500"], "--goodput").as_json(traces, 2.0) == {
        "goodput_requests_s": 1.0,
        "good_share": 0.4,
    }
    assert parse_limits(["ttft:500,itl:250"], "--goodput").as_json(traces, 2.0)["good_share"] == 0.2
    assert [RequestLimits(tpot=0.15).are_kept(each) for each in traces] == [True, True, False, False, False]
    assert parse_limits(["e2el:400"], "--goodput") == RequestLimits(e2e=0.4)
    for text in ("ttft", "ttft:0", "first:3", "e2e:inf"):
        with pytest.raises(ConfigError, match=f"--goodput='{text}'"):
            parse_limits([text], "--goodput")
