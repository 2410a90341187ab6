"""The figures of a benchmark report, from traces for which they are known."""

import math

import numpy as np
import pytest

from octavo.bench.arrivals import Arrivals
from octavo.bench.workload import random_prompts
from octavo.reports import Report, RequestTrace


def report(*traces: RequestTrace, duration: float = 2.0) -> dict[str, object]:
    made = Report(
        model="m",
        dtype="bfloat16",
        concurrency=2,
        prompt_len=10,
        output_len=3,
        duration=duration,
        traces=traces,
        extra={"request_rate": "inf"},
    )
    return made.as_json()


def trace(**changes) -> RequestTrace:
    return RequestTrace(
        **{"began": 1.0, "token_times": [1.5, 1.6, 2.0], "token_counts": [1, 1, 1], "ended": 2.0} | changes
    )


def test_throughput_and_latencies() -> None:
    values = report(trace(), trace())
    assert (values["output_tok_s"], values["total_tok_s"], values["requests_s"]) == (3.0, 13.0, 1.0)
    assert values["ttft_s"] == values["ttft_s_p99"] == 0.5
    assert values["e2e_s"] == 1.0
    assert values["itl_ms"] == pytest.approx(250)
    assert values["itl_ms_p50"] == pytest.approx(250)
    assert values["itl_ms_p99"] == pytest.approx(400, rel=1e-3)
    assert values["request_rate"] == "inf"


def test_a_message_of_several_tokens_shares_its_gap_among_them() -> None:
    assert trace(token_times=[1.0, 1.6], token_counts=[1, 3]).itl == pytest.approx([0.2, 0.2, 0.2])


def test_a_failed_request_counts_as_an_error_and_in_nothing_else() -> None:
    values = report(trace(), trace(error="Unavailable: gone"))
    assert (values["num_requests"], values["num_errors"], values["output_tok_s"]) == (2, 1, 1.5)


def test_without_a_success_there_are_no_latencies() -> None:
    values = report(trace(error="gone", token_times=[], token_counts=[]))
    assert values["ttft_s"] is None
    assert values["itl_ms_p90"] is None


def test_prompts_are_of_exact_length_within_the_vocabulary_and_repeatable() -> None:
    prompts = random_prompts(4, 50, 97, seed=3)
    assert [len(prompt) for prompt in prompts] == [50] * 4
    assert {0 <= token < 97 for prompt in prompts for token in prompt} == {True}
    assert prompts == random_prompts(4, 50, 97, seed=3)
    assert prompts[0] != prompts[1]


def test_arrivals_have_the_rate_asked_for() -> None:
    times = Arrivals(rate=8.0).times(4000, seed=1)
    # The mean of 4000 exponential gaps is within 5% of 1/8 for all but 1 seed in 600.
    assert np.mean(np.diff(times)) == pytest.approx(1 / 8, rel=0.05)
    assert times == sorted(times)
    assert Arrivals(rate=math.inf).times(3, seed=1) == [0.0] * 3
