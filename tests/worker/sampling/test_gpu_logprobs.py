"""Ranks and most likely tokens among equals agree with worker.sampling.logprobs."""

import numpy as np
import torch

from worker.sampling.gpu_logprobs import LogprobTensors, write_logprobs
from worker.sampling.logprobs import token_logprobs


def test_equals_are_ordered_by_id() -> None:
    """bf16 logits are full of equals; zeros of both signs are equal, too; a banned token has no probability."""
    generator = torch.Generator().manual_seed(0)
    logits_QV = (torch.randint(-6, 6, (5, 300), generator=generator) / 2).to(torch.bfloat16)
    logits_QV[0, ::3] = -0.0
    logits_QV[1] = -logits_QV[1].abs()
    logits_QV[2, 10:20] = float("-inf")
    logits_QV[3] = 1.5
    chosen = [7, 0, 15, 299, 100]
    into = LogprobTensors(
        torch.full((7,), torch.nan),
        torch.zeros(7, dtype=torch.int32),
        torch.zeros(7, 9, dtype=torch.int32),
        torch.full((7, 9), torch.nan),
    )
    # The fourth lists tokens.
    listed = [250, 3, 12]
    listed_QK = torch.full((5, 9), -1)
    listed_QK[3, :3] = torch.tensor(listed)
    write_logprobs(logits_QV, torch.tensor(chosen), into, 1, listed_QK)
    assert into.chosen_Q[[0, 6]].isnan().all()
    for i, token in enumerate(chosen):
        expected = token_logprobs(logits_QV[i].float().numpy(), token, 9, np.array(listed) if i == 3 else None)
        count = len(expected.top)
        assert count == (3 if i == 3 else 9)
        assert all((entry.rank == 0) == (i == 3) for entry in expected.top)
        assert into.ranks_Q[i + 1] == expected.chosen.rank
        assert into.top_ids_QK[i + 1, :count].tolist() == [entry.token_id for entry in expected.top]
        np.testing.assert_allclose(into.top_QK[i + 1, :count], [entry.logprob for entry in expected.top], atol=1e-6)
        np.testing.assert_allclose(into.chosen_Q[i + 1], expected.chosen.logprob, atol=1e-6)
