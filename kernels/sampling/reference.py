"""The ops of this folder in their plainest form: one row, a full sort, float64 sums."""

import torch


def draw_reference(logits_V: torch.Tensor, *, temperature: float, uniform: float, **filters: float) -> int:
    """`draw`. logits_V: float32. filters: as for filtered_cdf_reference."""
    cdf_V = filtered_cdf_reference(logits_V, temperature=temperature, **filters)
    return int(torch.searchsorted(cdf_V, uniform, right=True))


def filtered_cdf_reference(
    logits_V: torch.Tensor, *, temperature: float, top_k: float = 0, top_p: float = 1.0, min_p: float = 0.0
) -> torch.Tensor:
    """The filtered distribution's CDF in order of token id, float64 [V], ending in 1."""
    weights_V = torch.exp((logits_V - logits_V.max()) / torch.tensor(temperature, dtype=torch.float32))
    sorted_V = weights_V.sort(descending=True).values
    if top_k:
        sorted_V = sorted_V[: int(top_k)]
    least = sorted_V[-1]
    if top_p < 1.0:
        cumulative = sorted_V.double().cumsum(0)
        least = sorted_V[cumulative >= top_p * cumulative[-1]][0]
    least = torch.maximum(least, torch.tensor(min_p, dtype=torch.float32))
    kept_V = torch.where(weights_V >= least, weights_V, 0).double()
    return kept_V.cumsum(0) / kept_V.sum()


def penalties_reference(
    logits_V: torch.Tensor,
    prompt: list[int],
    output: list[int],
    *,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
) -> torch.Tensor:
    """`apply_penalties`, one token at a time, into a new tensor."""
    result_V = logits_V.clone()
    for token in set(prompt) | set(output):
        logit = result_V[token]
        result_V[token] = logit / repetition if logit > 0 else logit * repetition
    for token in set(output):
        result_V[token] -= frequency * output.count(token) + presence
    return result_V


def uniform_reference(seed: int, choice: int, position: int) -> float:
    """The number that decides one draw: Philox4x32-10 with the seed as its key and (position, choice, 0, 0) as its
    counter; 27 bits of its first word, then 26 of its second."""
    c0, c1, c2, c3 = position, choice, 0, 0
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c2 = (product1 >> 32) ^ c1 ^ k0, (product0 >> 32) ^ c3 ^ k1
        c1, c3 = product1 & 0xFFFFFFFF, product0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return ((c0 >> 5 << 26) + (c1 >> 6)) / (1 << 53)


def verify_reference(drawn: list[int], drafts: list[int]) -> list[int]:
    """A row's output. drawn[i]: its draw after its last token (i = 0) or after drafts[i - 1]; -1 if the draw failed."""
    said = []
    for i, token in enumerate(drawn):
        said.append(token)
        if i == len(drafts) or token != drafts[i] or token < 0:
            break
    return said


def banned_reference(sequences: list[list[int]], output: list[int]) -> set[int]:
    """The tokens that complete one of these sequences at the end of an output."""
    return {each[-1] for each in sequences if output[len(output) - len(each) + 1 :] == each[:-1]}
