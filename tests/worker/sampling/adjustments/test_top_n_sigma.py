"""top_n_sigma on a CPU and on a GPU, against its definition in float64."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from protos.inference_pb2 import SamplingParams
from tests.support.gpu.gpu_engine import EngineRun, outputs_alone
from worker.device.staging import Part
from worker.sampling.adjustments.top_n_sigma import TopNSigma, TopNSigmaTable
from worker.sampling.feature import NewRow

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]


def kept_reference(logits: list[float], n: float) -> list[bool]:
    """The definition, computed with exact sums (fsum)."""
    there = [logit for logit in logits if logit > -math.inf]
    mean = math.fsum(there) / len(there)
    sigma = math.sqrt(math.fsum((logit - mean) ** 2 for logit in there) / len(there))
    least = max(there) - n * sigma
    return [logit >= least for logit in logits]


def rows_of_logits(num_rows: int, vocab_size: int) -> np.ndarray:
    logits_AV = np.random.default_rng(vocab_size).normal(scale=3, size=(num_rows, vocab_size)).astype(np.float32)
    # Banned tokens do not count in the deviation.
    logits_AV[:, ::7] = -np.inf
    return logits_AV


def on_gpu(logits_AV: np.ndarray, n_A: list[float]) -> np.ndarray:
    """n = 0: the row does not use top_n_sigma."""
    table = TopNSigmaTable(torch.device("cpu"), num_rows=1, vocab_size=logits_AV.shape[1])
    adjusted_AV = torch.from_numpy(logits_AV.copy())
    n = np.array(n_A)
    staged = [Part(np.flatnonzero(n), 0), Part(n[n > 0], 0)]
    for part in staged:
        part.tensor = torch.from_numpy(part.array)
    table.apply(adjusted_AV, torch.zeros(len(n_A), dtype=torch.int32), staged)
    return adjusted_AV.numpy()


@pytest.mark.parametrize("vocab_size", [1, 2, 101, 1000, 49_152])
def test_what_stays_is_what_the_definition_keeps(vocab_size: int) -> None:
    """CPU and GPU could differ only in a logit within 1e-13 of the bound, and there is none here."""
    n_A = [0.5, 1.0, 2.5, 0.0, 3.5]
    logits_AV = rows_of_logits(len(n_A), max(vocab_size, 2))[:, -vocab_size:]
    adjusted_AV = on_gpu(logits_AV, n_A)
    for logits_V, adjusted_V, n in zip(logits_AV, adjusted_AV, n_A, strict=True):
        kept_V = kept_reference(logits_V.tolist(), n) if n else [True] * vocab_size
        expected_V = np.where(kept_V, logits_V, np.float32(-np.inf))
        assert np.array_equal(adjusted_V, expected_V)
        if n:
            on_cpu_V = logits_V.copy()
            TopNSigma(n).apply(on_cpu_V)
            assert np.array_equal(on_cpu_V, expected_V)
            assert vocab_size < 100 or 0 < np.isfinite(expected_V).sum() < np.isfinite(logits_V).sum()


def test_a_position_keeps_the_same_alone_and_among_many() -> None:
    """The positions are more than one slice."""
    logits_AV = rows_of_logits(40, 3001)
    together_AV = on_gpu(logits_AV, [1.2] * 40)
    for i in (0, 15, 16, 39):
        assert np.array_equal(on_gpu(logits_AV[i : i + 1], [1.2])[0], together_AV[i])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_position_that_is_not_finite_still_fails(bad: float) -> None:
    logits_AV = rows_of_logits(2, 50)
    logits_AV[0, 3] = bad
    adjusted_AV = on_gpu(logits_AV, [1.0, 1.0])
    assert np.array_equal(adjusted_AV[0], logits_AV[0], equal_nan=True)
    assert np.array_equal(adjusted_AV[1], on_gpu(logits_AV[1:], [1.0])[0])


@pytest.mark.parametrize("params", [{"temperature": 0.0, "top_n_sigma": 1.0}, {"temperature": 1.0, "seed": 1}])
def test_rows_that_are_greedy_or_do_not_ask_stay_as_they_are(params: dict[str, Any]) -> None:
    nothing = np.zeros(0, np.int32)
    new = NewRow(
        sampling=SamplingParams(**params), prompt=nothing, output=nothing, vocab_size=9, eos_token_ids=frozenset()
    )
    assert TopNSigma.add(new) is None


def test_a_row_that_comes_back_goes_on() -> None:
    """In a GPU engine it comes back in another row with its output so far; its tokens equal a CPU's."""
    params = SamplingParams(temperature=2.5, seed=4, top_n_sigma=1.0, frequency_penalty=0.5)
    expected = outputs_alone(PROMPT, params, 9)
    plain = SamplingParams(temperature=2.5, seed=4, frequency_penalty=0.5)
    assert expected != outputs_alone(PROMPT, plain, 9)
    run = EngineRun()
    assert run.run(0, PROMPT, params, 3) == expected[:3]
    run.free(0)
    run.add(0, PROMPT, plain)
    run.add(3, PROMPT, params, output=expected[:3])
    run.step({0: 11, 3: 14})
    # With drafts, each position has its own logits.
    run.step({0: 1, 3: 1}, drafts={0: [], 3: expected[4:7]})
    run.step({0: 1, 3: 1})
    assert run.rows[3].output == expected[: len(run.rows[3].output)]
    assert len(run.rows[3].output) == 9
