"""Choice of tokens for each kind of row, beside PyTorch's softmax, sort and multinomial."""

import torch

from benchmarks.gpu.ops._bandwidth import measure, num_bytes_of
from benchmarks.gpu.report import Report
from kernels.sampling.reference import filtered_cdf_reference, uniform_reference
from kernels.sampling.triton import SamplingColumns, greedy, sample
from kernels.sampling.triton_adjust import apply_bitmask, apply_penalties

# Name, temperature, top_k, top_p, min_p.
_KINDS = (
    ("greedy", 0.0, 0, 1.0, 0.0),
    ("temperature", 0.8, 0, 1.0, 0.0),
    ("top_k 50", 0.8, 50, 1.0, 0.0),
    ("top_p 0.95", 0.8, 0, 0.95, 0.0),
    ("top_k 50, top_p 0.95", 0.8, 50, 0.95, 0.0),
    # A nucleus of tens of thousands of tokens.
    ("flat, top_p 0.95", 50.0, 0, 0.95, 0.0),
    ("min_p 0.05", 0.8, 0, 1.0, 0.05),
)


def run(report: Report, *, toy: bool) -> None:
    vocabulary = 130 if toy else 128256
    for num_rows in (2,) if toy else (1, 32, 256):
        _rows(report, torch.randn(num_rows, vocabulary, device=report.device) * 4)


def _rows(report: Report, logits_LV: torch.Tensor) -> None:
    for kind in _KINDS:
        _kind(report, logits_LV, *kind)
    case = f"{len(logits_LV)} x {logits_LV.shape[1]}"
    once = num_bytes_of(logits_LV)
    measure(report, "sampling", f"{case} greedy", "greedy()", once, lambda: greedy(logits_LV))
    measure(report, "sampling", f"{case} greedy", "torch argmax", once, lambda: logits_LV.argmax(-1))
    measure(report, "sampling", f"{case} top_p 0.95", "torch sort", once, lambda: _sorted_draw(logits_LV))
    _adjustments(report, logits_LV)


def _kind(
    report: Report, logits_LV: torch.Tensor, name: str, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    num_rows, vocabulary = logits_LV.shape
    case = f"{num_rows} x {vocabulary} {name}"
    device = logits_LV.device
    columns = SamplingColumns(
        temperature_R=torch.full((num_rows,), temperature, device=device),
        top_k_R=torch.full((num_rows,), top_k, dtype=torch.int64, device=device),
        top_p_R=torch.full((num_rows,), top_p, dtype=torch.float64, device=device),
        min_p_R=torch.full((num_rows,), min_p, device=device),
        seed_R=torch.arange(num_rows, dtype=torch.int64, device=device),
        choice_R=torch.zeros(num_rows, dtype=torch.int32, device=device),
    )
    rows_L = torch.arange(num_rows, dtype=torch.int32, device=device)
    positions_L = torch.zeros_like(rows_L)
    tokens_L = torch.empty_like(rows_L)
    filters = (top_k, top_p, min_p) != (0, 1.0, 0.0)

    def call() -> None:
        sample(logits_LV, rows_L, positions_L, columns, tokens_L, draws=temperature > 0, filters=filters)

    call()
    token = int(tokens_L[0])
    if temperature:
        cdf_V = filtered_cdf_reference(
            logits_LV[0].cpu(), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
        )
        # The row's uniform number lies within the token's step of the CDF, up to float32's rounding.
        uniform = torch.tensor(uniform_reference(0, 0, 0), dtype=torch.float64)
        low, high = cdf_V[token - 1] if token else torch.zeros_like(uniform), cdf_V[token]
        report.check("sampling", case, uniform.clamp(low, high), uniform, rtol=0, atol=2**-18)
    else:
        report.check("sampling", case, tokens_L, logits_LV.argmax(-1), rtol=0, atol=0)
    measure(report, "sampling", case, "sample()", num_bytes_of(logits_LV), call)


def _sorted_draw(logits_LV: torch.Tensor) -> torch.Tensor:
    """The usual way in PyTorch."""
    sorted_LV, ids_LV = (logits_LV / 0.8).softmax(-1).sort(-1, descending=True)
    kept_LV = sorted_LV * (sorted_LV.cumsum(-1) - sorted_LV < 0.95)
    return ids_LV.gather(-1, torch.multinomial(kept_LV, 1))


def _adjustments(report: Report, logits_LV: torch.Tensor) -> None:
    num_rows, vocabulary = logits_LV.shape
    case = f"{num_rows} x {vocabulary}"
    device = logits_LV.device
    rows_L = torch.arange(num_rows, dtype=torch.int32, device=device)
    masks_RW = torch.full((num_rows, -(-vocabulary // 32)), 0x55555555, dtype=torch.int32, device=device)
    counts_RV = torch.zeros(num_rows, vocabulary, dtype=torch.int32, device=device)
    ones_R = torch.ones(num_rows, device=device)
    adjusted_LV = logits_LV.clone()

    def penalties() -> None:
        apply_penalties(
            adjusted_LV, rows_L, masks_RW, counts_RV, repetition_R=ones_R * 1.1, presence_R=ones_R, frequency_R=ones_R
        )

    penalties()
    prompt_V = torch.arange(vocabulary, device=device) % 2 == 0
    expected_LV = torch.where(logits_LV > 0, logits_LV / 1.1, logits_LV * 1.1).where(prompt_V, logits_LV)
    report.check("sampling", f"{case} penalties", adjusted_LV, expected_LV, rtol=1e-6, atol=1e-6)
    apply_bitmask(adjusted_LV, rows_L, masks_RW)
    expected_LV = expected_LV.where(prompt_V, float("-inf"))
    report.check("sampling", f"{case} bitmask", adjusted_LV, expected_LV, rtol=1e-6, atol=1e-6)
    once = 2 * num_bytes_of(logits_LV) + num_bytes_of(masks_RW, counts_RV)
    measure(report, "sampling", f"{case} penalties", "all three", once, penalties)
    written = num_bytes_of(logits_LV) // 2 + num_bytes_of(masks_RW)
    measure(
        report,
        "sampling",
        f"{case} bitmask",
        "half allowed",
        written,
        lambda: apply_bitmask(adjusted_LV, rows_L, masks_RW),
    )
