"""Adjustments of logits and verification of drafts on a GPU, against the plain references."""

import pytest
import torch

from kernels.sampling import triton as gpu
from kernels.sampling import triton_adjust
from kernels.sampling.reference import banned_reference, penalties_reference, verify_reference
from kernels.sampling.triton_verify import verify
from tests.support.gpu.gpu import DEVICE

# One token more than a program's chunk of a row.
VOCABULARY = 4097


def ints(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def floats(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=DEVICE)


def logits_of(num_scored: int) -> torch.Tensor:
    return torch.randn(num_scored, VOCABULARY, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def bits_of(sets: list[list[int]]) -> torch.Tensor:
    masks_RW = torch.zeros(len(sets), -(-VOCABULARY // 32), dtype=torch.int64)
    for row, tokens in enumerate(sets):
        for token in set(tokens):
            masks_RW[row, token // 32] |= 1 << token % 32
    return masks_RW.to(torch.int32).to(DEVICE)


@pytest.mark.parametrize("repetition", [1.0, 1.3, 0.5])
@pytest.mark.parametrize(("presence", "frequency"), [(0.0, 0.0), (0.7, 0.0), (-0.5, 1.5)])
def test_penalties_agree_with_the_reference(repetition: float, presence: float, frequency: float):
    prompt, output, drafts = [1, 2, 2, 31, 4096], [2, 7, 7, 7, 32], [7, 9, 9]
    counts_RV = torch.zeros(2, VOCABULARY, dtype=torch.int32, device=DEVICE)
    triton_adjust.count_output(counts_RV, ints([1, -1]), ints([[*output, 5], [3] * 6]), ints([5, 6]))
    # Row 0 is free; its values would show if a kernel used them.
    counts_RV[0] = 99
    logits_LV = logits_of(4)
    changed_LV = logits_LV.clone()
    triton_adjust.apply_penalties(
        changed_LV,
        ints([1, -1, 1, 1]),
        bits_of([list(range(VOCABULARY)), prompt]),
        counts_RV,
        repetition_R=floats([3.0, repetition]),
        presence_R=floats([9.0, presence]),
        frequency_R=floats([9.0, frequency]),
        drafts_LD=ints([[-1] * 3, [5] * 3, [7, -1, -1], drafts]),
    )
    for at, drafted in ((0, []), (2, [7]), (3, drafts)):
        expected_V = penalties_reference(
            logits_LV[at].cpu(), prompt, output + drafted, repetition=repetition, presence=presence, frequency=frequency
        )
        # A fused multiplication and addition rounds once where the reference rounds twice.
        torch.testing.assert_close(changed_LV[at].cpu(), expected_V, atol=2e-6, rtol=0)
    assert torch.equal(changed_LV[1], logits_LV[1])


# The interpreter's numpy warns about overflows, a GPU does not.
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_penalties_leave_logits_finite_bans_and_nan_as_they_are():
    logits_LV = logits_of(1)
    logits_LV[0, :4] = floats([30.0, -30.0, float("-inf"), float("nan")])
    masks = (bits_of([list(range(VOCABULARY))]), torch.zeros(1, VOCABULARY, dtype=torch.int32, device=DEVICE))
    off = floats([0.0])
    triton_adjust.apply_penalties(
        logits_LV, ints([0]), *masks, repetition_R=floats([1e-38]), presence_R=off, frequency_R=off
    )
    assert torch.isfinite(logits_LV[0, [0, 1]]).all()
    assert logits_LV[0, 2] == float("-inf")
    assert torch.isnan(logits_LV[0, 3])


def test_logit_bias_and_bans_reach_the_row_s_tokens_alone():
    logits_LV = logits_of(4)
    before_LV = logits_LV.clone()
    rows_L = ints([1, -1, 0, 1])
    triton_adjust.add_logit_bias(
        logits_LV, rows_L, ints([[-1] * 3, [4096, 2, -1]]), floats([[8.0] * 3, [1.5, -100, 5]])
    )
    triton_adjust.ban_tokens(logits_LV, rows_L, ints([4, 0, 0, 5]), ints([9, 5]), ints([[4096, -1, -1], [6, 7, -1]]))
    expected_LV = before_LV
    expected_LV[[0, 3], 4096] += 1.5
    expected_LV[[0, 3], 2] -= 100
    expected_LV[2, 4096] = expected_LV[0, 6] = expected_LV[0, 7] = float("-inf")
    assert torch.equal(logits_LV, expected_LV)


def test_sequences_are_banned_where_the_output_ends_with_their_beginning():
    """Outputs go round the memory of their last tokens, and drafts count as output."""
    generator = torch.Generator().manual_seed(2)
    history, places, num_drafts = 8, 3, 3
    said_RH, lengths_R = torch.full((places, history), -7, dtype=torch.int32, device=DEVICE), ints([0] * places)
    # Few tokens, so that sequences match often; one sequence is as long as the memory.
    sequences = [[[3], [1, 2], [2, 2, 1], [1, 1, 2, 1]], [[4096]], [[1] * 7 + [2], [2, 1], [1, 2, 1, 2, 1]]]
    flat = [[token for each in row for token in each] for row in sequences]
    ends = [torch.tensor(list(map(len, row))).cumsum(0).tolist() for row in sequences]
    token_ids_RT = ints([row + [-1] * (20 - len(row)) for row in flat])
    ends_RK = ints([row + [0] * (5 - len(row)) for row in ends])
    outputs: list[list[int]] = [[], [], []]
    num_banned = 0
    for _ in range(25):
        drafts = torch.randint(1, 3, (num_drafts,), generator=generator).tolist()
        # Each place has a position after each number of drafts, and there is padding between them.
        rows, positions, drafts_LD, befores = [], [], [], []
        for row in (2, 0, -1, 1):
            for count in range(num_drafts + 1):
                rows.append(row)
                positions.append(len(outputs[row]) + count)
                drafts_LD.append(drafts[:count] + [-1] * (num_drafts - count))
                befores.append(outputs[row] + drafts[:count])
        logits_LV = logits_of(len(rows))
        expected_LV = logits_LV.clone()
        for expected_V, row, before in zip(expected_LV, rows, befores, strict=True):
            banned = banned_reference(sequences[row], before) if row >= 0 else set()
            expected_V[list(banned)] = float("-inf")
            num_banned += len(banned)
        tables = (ints(positions), token_ids_RT, ends_RK, said_RH)
        triton_adjust.ban_sequences(logits_LV, ints(rows), *tables, drafts_LD=ints(drafts_LD))
        assert torch.equal(logits_LV, expected_LV)
        tokens_ND = torch.randint(1, 3, (4, 3), generator=generator)
        counts = torch.randint(1, 4, (4,), generator=generator).tolist()
        for place, row in enumerate((1, -1, 0, 2)):
            if row >= 0:
                outputs[row] += tokens_ND[place, : counts[place]].tolist()
        triton_adjust.remember_output(
            said_RH, lengths_R, ints([1, -1, 0, 2]), tokens_ND.to(torch.int32).to(DEVICE), ints(counts)
        )
    assert lengths_R.tolist() == list(map(len, outputs))
    assert min(map(len, outputs)) > 3 * history
    assert num_banned > 300


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bitmask_leaves_what_it_allows(dtype: torch.dtype):
    logits_LV = logits_of(3).to(dtype)
    before_LV = logits_LV.clone()
    allowed = [0, 31, 32, 63, 4095, 4096]
    triton_adjust.apply_bitmask(logits_LV, ints([1, -1, 0]), bits_of([list(range(VOCABULARY)), allowed]))
    assert torch.equal(logits_LV[1:], before_LV[1:])
    assert torch.equal(logits_LV[0, allowed], before_LV[0, allowed])
    assert int(torch.isfinite(logits_LV[0]).sum()) == len(allowed)


def test_drafts_count_until_the_first_that_the_draw_does_not_say():
    poison = -77
    drawn = [[5, 6, 7, 8], [5, 9, 7, 8], [1], [4, 4, 2], [-1, 3], [2, -1, -1], [poison]]
    drafts = [[5, 6, 7], [5, 6, 7], [], [3, 4], [-1], [2, -1], None]
    width = 4
    starts, flat, inputs = [0], [], []
    for tokens, draft in zip(drawn, drafts, strict=True):
        # The token before a row's drafts would be accepted if it were the draft behind those of the row before.
        inputs += [] if draft is None else [flat[-1] if flat else poison, *draft]
        flat += [] if draft is None else tokens
        starts.append(len(flat))
    inputs.append(flat[-1])
    tokens_ND1 = torch.full((len(drawn), width), poison, dtype=torch.int32, device=DEVICE)
    counts_N = torch.full((len(drawn),), poison, dtype=torch.int32, device=DEVICE)
    verify(ints(flat), ints(inputs), ints(starts), tokens_ND1, counts_N)
    for n, draft in enumerate(drafts):
        said = [] if draft is None else verify_reference(drawn[n], draft)
        assert tokens_ND1[n].tolist() == said + [poison] * (width - len(said))
        assert counts_N[n] == (poison if draft is None else len(said))


def test_output_does_not_depend_on_drafts():
    """The model's logits depend on the last token; drafts are right, wrong, or right by chance."""
    vocabulary, length, width = 20, 6, 3
    table_VV = torch.randn(vocabulary, vocabulary, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    columns = gpu.SamplingColumns(
        temperature_R=floats([1.0]),
        top_k_R=ints([0]),
        top_p_R=torch.ones(1, dtype=torch.float64, device=DEVICE),
        min_p_R=floats([0.0]),
        seed_R=torch.tensor([2**63 - 5], dtype=torch.int64, device=DEVICE),
        choice_R=ints([1]),
    )

    def draws(last_tokens: list[int], first_position: int) -> torch.Tensor:
        count = len(last_tokens)
        tokens_L = ints([0] * count)
        positions_L = ints(list(range(first_position, first_position + count)))
        gpu.sample(table_VV[last_tokens], ints([0] * count), positions_L, columns, tokens_L, filters=False)
        return tokens_L

    plain = [0]
    for position in range(length):
        plain.append(int(draws(plain[-1:], position)[0]))
    for wrong in (99, 0, 1, 2):
        said = [0]
        while len(said) <= length:
            drafts = [(token + (i == wrong)) % vocabulary for i, token in enumerate(plain[len(said) :][:width])]
            tokens_ND1, counts_N = ints([[-77] * (width + 1)]), ints([-77])
            inputs = [said[-1], *drafts]
            verify(draws(inputs, len(said) - 1), ints(inputs), ints([0, len(inputs)]), tokens_ND1, counts_N)
            assert int(counts_N[0]) == min(wrong, len(drafts)) + 1
            said += tokens_ND1[0, : counts_N[0]].tolist()
        assert said[: length + 1] == plain
