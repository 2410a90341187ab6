"""kernels/sampling/triton.py against the plain reference. Resuming elsewhere relies on equal draws, whatever else is in
the batch and however the vocabulary is cut."""

import numpy as np
import pytest
import torch

from kernels.sampling import triton as gpu
from kernels.sampling.reference import filtered_cdf_reference, uniform_reference
from tests.support.gpu.gpu import DEVICE
from worker.sampling.uniforms import uniforms as uniforms_of_worker

# top_k, top_p, min_p.
FILTERS = [
    (0, 1.0, 0.0),
    (1, 1.0, 0.0),
    (5, 1.0, 0.0),
    (0, 0.5, 0.0),
    (0, 0.9999999, 0.0),
    (0, 1e-6, 0.0),
    (0, 1.0, 0.1),
    (0, 1.0, 1.0),
    (50, 0.9, 0.02),
    (200, 0.99, 0.0),
    (10**9, 0.7, 0.0),
]
POISON = -77


def columns(
    temperatures: list[float], filters: list[tuple[int, float, float]], seeds: list[int] | None = None
) -> gpu.SamplingColumns:
    top_k, top_p, min_p = zip(*filters, strict=True)
    return gpu.SamplingColumns(
        temperature_R=torch.tensor(temperatures, dtype=torch.float32, device=DEVICE),
        top_k_R=torch.tensor(top_k, dtype=torch.int64, device=DEVICE),
        top_p_R=torch.tensor(top_p, dtype=torch.float64, device=DEVICE),
        min_p_R=torch.tensor(min_p, dtype=torch.float32, device=DEVICE),
        seed_R=torch.tensor(seeds or range(len(filters)), dtype=torch.int64, device=DEVICE),
        choice_R=torch.zeros(len(filters), dtype=torch.int32, device=DEVICE),
    )


def sampled(
    logits_LV: torch.Tensor, rows: list[int], positions: list[int], parameters: gpu.SamplingColumns, **options: bool
) -> list[int]:
    tokens_L = torch.full((len(rows),), POISON, dtype=torch.int32, device=DEVICE)
    rows_L, positions_L = (torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in (rows, positions))
    gpu.sample(logits_LV.to(DEVICE), rows_L, positions_L, parameters, tokens_L, **options)
    return tokens_L.tolist()


def random_logits(num_rows: int, vocabulary: int, spread: float, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def test_uniforms_are_those_of_the_worker_bit_for_bit():
    rng = np.random.default_rng(0)
    seeds = rng.integers(0, 2**64, 131, dtype=np.uint64)
    choices, positions = rng.integers(0, 2**32, (2, 131), dtype=np.uint32)
    seeds[0], choices[1], positions[2] = 2**64 - 1, 2**32 - 1, 2**32 - 1
    arrays = (seeds.view(np.int64), choices.view(np.int32), positions.view(np.int32))
    got = gpu.uniforms(*(torch.from_numpy(each.copy()).to(DEVICE) for each in arrays))
    assert got.tolist() == uniforms_of_worker(seeds, choices, positions).tolist()
    numbers = zip(seeds.tolist(), choices.tolist(), positions.tolist(), strict=True)
    assert got.tolist() == [uniform_reference(*each) for each in numbers]


# 4097: one token above a program's chunk. 70,001: more chunks than the next lower power of two.
@pytest.mark.parametrize(("vocabulary", "spread"), [(1, 1.0), (311, 0.01), (311, 8.0), (4097, 2.0), (70_001, 1.0)])
def test_draw_agrees_with_the_reference(vocabulary: int, spread: float):
    filters = {311: FILTERS, 70_001: FILTERS[6:7]}.get(vocabulary, FILTERS[8:10])
    logits_V = random_logits(1, vocabulary, spread)[0]
    count = len(filters)
    parameters = columns([0.9] * count, filters)
    tokens = sampled(logits_V.expand(count, -1), list(range(count)), [3] * count, parameters)
    for row, (top_k, top_p, min_p) in enumerate(filters):
        uniform = uniform_reference(row, 0, 3)
        cdf_V = filtered_cdf_reference(logits_V, temperature=0.9, top_k=top_k, top_p=top_p, min_p=min_p)
        expected = int(torch.searchsorted(cdf_V, uniform, right=True))
        # float32 weights of another exponential: a uniform within rounding of a step may fall to either side.
        near = abs(float(cdf_V[min(tokens[row], expected)]) - uniform) < 2**-20
        assert tokens[row] == expected or near, (row, filters[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_position_has_a_draw_of_its_own(dtype: torch.dtype):
    """Each draw is within the reference's step of its own uniform."""
    logits_V = random_logits(1, 37, 1.5, seed=4)[0].to(dtype)
    count = 30
    tokens = sampled(
        logits_V.expand(count, -1), [0] * count, list(range(count)), columns([0.7], [(0, 1.0, 0.0)]), filters=False
    )
    cdf_V = filtered_cdf_reference(logits_V.float(), temperature=0.7).tolist()
    for position, token in enumerate(tokens):
        uniform = uniform_reference(0, 0, position)
        assert (cdf_V[token - 1] if token else 0.0) - 2**-20 <= uniform < cdf_V[token] + 2**-20


def test_equal_tokens_stay_or_go_together():
    # bfloat16 logits are full of ties: the order of the search must not decide which of several equals survives.
    logits_V = torch.full((130,), float("-inf"))
    logits_V[[5, 70, 120]] = torch.tensor([0.4, 0.3, 0.3]).log()
    # One position for each third of the unit interval.
    wanted = [(0.0, 0.3), (0.45, 0.65), (0.75, 1.0)]
    positions = [next(i for i in range(99) if low < uniform_reference(0, 0, i) < high) for low, high in wanted]
    # top_k 2 keeps both equals, but top_p counts only one of them: 0.4 / 0.7 is above 0.57.
    for filters, expected in (((0, 0.7, 0.0), [5, 70, 120]), ((2, 1.0, 0.0), [5, 70, 120]), ((2, 0.57, 0.0), [5])):
        some = positions[-len(expected) :]
        assert sampled(logits_V.expand(len(some), -1), [0] * len(some), some, columns([1.0], [filters])) == expected


def test_a_draw_depends_neither_on_the_batch_nor_on_how_the_vocabulary_is_cut(monkeypatch: pytest.MonkeyPatch):
    logits_LV = random_logits(4, 300, 3.0)
    filters = [(30, 0.9, 0.0), (0, 0.95, 0.0), (0, 1.0, 0.05), (0, 1.0, 0.0)]
    parameters = columns([1.3, 0.8, 1.0, 1.0], filters)
    positions = [11, 12, 13, 14]
    together = sampled(logits_LV, [0, 1, 2, 3], positions, parameters)
    order = [2, 0, 3, 1]
    permuted = sampled(logits_LV[order], order, [positions[i] for i in order], parameters)
    assert permuted == [together[i] for i in order]
    assert sampled(logits_LV[1:2], [1], positions[1:2], parameters) == together[1:2]
    monkeypatch.setattr(gpu, "CHUNK", 128)
    assert sampled(logits_LV, [0, 1, 2, 3], positions, parameters) == together


def test_padding_is_inert_and_greedy_rows_take_the_likeliest():
    logits_LV = random_logits(5, 4100, 1.0)
    logits_LV[1] = float("nan")
    logits_LV[2, [7, 4099]] = 9.0
    parameters = columns([0.0, 1.0], [(0, 1.0, 0.0), (3, 0.9, 0.0)])
    rows, positions = [0, -1, 0, -1, 1], [0, POISON, 1, POISON, 2]
    tokens = sampled(logits_LV, rows, positions, parameters)
    assert tokens[:4] == [int(logits_LV[0].argmax()), POISON, 7, POISON]
    assert tokens[4] in logits_LV[4].topk(3).indices.tolist()
    assert sampled(logits_LV[:4], rows[:4], positions[:4], parameters, draws=False) == tokens[:4]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_cannot_be_sampled_say_so_alone(temperature: float):
    logits_LV = random_logits(5, 261, 1.0)
    # In the last vector, in the middle, everywhere.
    logits_LV[0, 260], logits_LV[1, 77], logits_LV[2, 3] = float("nan"), float("nan"), float("inf")
    logits_LV[3] = float("-inf")
    tokens = sampled(logits_LV, [0] * 5, [0] * 5, columns([temperature], [(0, 0.9, 0.0)]))
    assert tokens[:4] == [-1] * 4
    assert tokens[4] >= 0


# The interpreter's numpy warns about overflows, a GPU does not.
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("temperature", [2e-5, 100.0])
@pytest.mark.parametrize("size", [1.0, 3e38])
def test_no_temperature_and_no_size_of_logits_overflows(temperature: float, size: float):
    """At 3e38 the difference of two logits is infinite; a temperature near 0 leaves only the largest logit."""
    logits_V = torch.linspace(-1, 1, 150) * size
    filters = [(0, 1.0, 0.0), (3, 0.9, 0.0), (0, 0.5, 0.0)]
    tokens = sampled(logits_V.expand(3, -1), [0, 1, 2], [0] * 3, columns([temperature] * 3, filters))
    for row, (top_k, top_p, min_p) in enumerate(filters):
        cdf_V = filtered_cdf_reference(logits_V, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        token = tokens[row]
        low, high = float(cdf_V[token - 1]) if token else 0.0, float(cdf_V[token])
        assert low - 1e-5 <= uniform_reference(row, 0, 0) < high + 1e-5


def test_greedy_takes_the_lowest_of_equals_and_shows_what_is_not_finite():
    logits_LV = torch.zeros(5, 4099, dtype=torch.bfloat16)
    logits_LV[0, [3, 4097]] = 5.0
    logits_LV[1, 10], logits_LV[1, 20] = float("nan"), 9.0
    logits_LV[2, 30] = float("inf")
    logits_LV[3] = float("-inf")
    logits_LV[4, 4098] = 1.0
    tokens_L, largest_L = gpu.greedy(logits_LV.to(DEVICE))
    assert tokens_L[[0, 4]].tolist() == [3, 4098]
    assert torch.isfinite(largest_L).tolist() == [True, False, False, False, True]


def test_too_large_a_vocabulary_is_refused():
    with pytest.raises(ValueError, match="524289"):
        sampled(torch.zeros(1, 2**19 + 1), [0], [0], columns([1.0], [(0, 1.0, 0.0)]))
