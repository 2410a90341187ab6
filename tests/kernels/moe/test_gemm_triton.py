"""kernels/moe_gemm against a loop over pairs; batches, padding and other ranks must not change results."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from kernels.elementwise.silu_mul.reference import clamped_swiglu
from kernels.gemm.quantize import reference as fp8
from kernels.moe.gemm.reference import run_experts_reference
from kernels.moe.gemm.tiles import FEW, MANY, SOME, MoeTile, as_moe_tile, tile_for
from kernels.moe.gemm.triton import Experts, run_experts
from kernels.moe.routing.triton import route
from kernels.triton_common.tuned_tiles import Tile
from tests.support.gpu.gpu import DEVICE
from tests.support.gpu.reads import reads_of


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Makes torch.empty return memory full of NaN and of the largest integers."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def random(*shape: int, seed: int, size: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * size).to(torch.bfloat16).to(DEVICE)


def routing(num_tokens: int, top_k: int, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    weights_TK = torch.rand(num_tokens, top_k, generator=generator)
    experts_TK = torch.rand(num_tokens, num_experts, generator=generator).topk(top_k).indices.to(torch.int32)
    return weights_TK.to(DEVICE), experts_TK.to(DEVICE)


def experts_of(num_experts: int, hidden_size: int, size: int) -> Experts:
    return Experts(
        gate_up_E2IH=random(num_experts, 2 * size, hidden_size, seed=1, size=hidden_size**-0.5),
        down_EHI=random(num_experts, hidden_size, size, seed=2, size=size**-0.5),
    )


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "hidden_size", "size", "tile"),
    [
        (1, 1, 1, 16, 16, FEW),
        # Neither size is a multiple of a tile.
        (5, 3, 4, 144, 80, FEW),
        # One row more than a block; two blocks of one expert beside each other.
        (67, 1, 2, 80, 144, SOME),
        (19, 2, 3, 64, 64, MANY),
    ],
)
def test_agrees_with_the_reference(
    num_tokens: int, top_k: int, num_experts: int, hidden_size: int, size: int, tile: MoeTile
):
    x_TH = random(num_tokens, hidden_size, seed=3)
    experts = experts_of(num_experts, hidden_size, size)
    weights_TK, experts_TK = routing(num_tokens, top_k, num_experts)
    out_TH = run_experts(x_TH, experts, weights_TK, experts_TK, tile=tile)
    expected = run_experts_reference(
        x_TH.cpu(), experts.gate_up_E2IH.cpu(), experts.down_EHI.cpu(), weights_TK, experts_TK
    )
    # Numbers between the GEMMs, and results, are rounded to 8 bits; sums have some 100 terms.
    torch.testing.assert_close(out_TH.double().cpu(), expected, rtol=2**-6, atol=2**-7)


@pytest.mark.skipif(DEVICE != "cpu", reason="counts what the interpreter loads")
def test_rows_without_a_pair_read_nothing():
    """A token's row is read by each of its experts, not by the other rows of their tiles, too."""
    x_TH, experts = random(3, 64, seed=3), experts_of(4, 64, 32)
    weights_TK, experts_TK = routing(3, 2, 4)
    assert FEW.gated_block_n >= 32, "one tile of columns"
    with reads_of(x_TH) as reads:
        run_experts(x_TH, experts, weights_TK, experts_TK, tile=FEW)
    assert (reads == 2).all()


@pytest.mark.parametrize("tile", [FEW, MANY])
def test_biases_and_a_clamped_activation_agree_with_the_reference(tile: MoeTile):
    """Gates and ups beyond the limits of 7, and biases that differ by expert."""
    num_experts, hidden_size, size = 3, 80, 48
    plain = experts_of(num_experts, hidden_size, size)
    biases = {
        "gate_up_bias_E2I": random(num_experts, 2 * size, seed=8, size=6),
        "down_bias_EH": random(num_experts, hidden_size, seed=9),
    }
    experts = replace(plain, **biases, activation="clamped_swiglu")
    x_TH = random(9, hidden_size, seed=3)
    weights_TK, experts_TK = routing(9, 2, num_experts)
    expected = run_experts_reference(
        x_TH.cpu(),
        plain.gate_up_E2IH.cpu(),
        plain.down_EHI.cpu(),
        weights_TK,
        experts_TK,
        **{name: bias.cpu() for name, bias in biases.items()},
        activated=clamped_swiglu,
    )
    out_TH = run_experts(x_TH, experts, weights_TK, experts_TK, tile=tile)
    # Numbers between the GEMMs, up to 50 here, are rounded to 8 bits.
    torch.testing.assert_close(out_TH.double().cpu(), expected, rtol=2**-6, atol=2**-4)


def quantized_experts(num_experts: int, hidden_size: int, size: int) -> tuple[Experts, list[torch.Tensor]]:
    """e4m3 experts, and their dequantized weights. Blocks differ in magnitude by up to 16 times, so that a wrong
    block's scale shows."""
    weights: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for i, (rows, columns) in enumerate(((2 * size, hidden_size), (hidden_size, size))):
        numbers = random(num_experts, rows, columns, seed=5 + i, size=columns**-0.5).float().cpu()
        generator = torch.Generator().manual_seed(7 + i)
        factors = 2.0 ** torch.randint(-2, 3, (num_experts, rows // 128, columns // 128), generator=generator)
        numbers *= factors.repeat_interleave(128, 1).repeat_interleave(128, 2)
        quantized, scales = zip(*(fp8.quantize_blocks(each) for each in numbers), strict=True)
        restored = [
            q.float() * fp8.spread(s, (128, 128), (rows, columns)) for q, s in zip(quantized, scales, strict=True)
        ]
        weights.append((torch.stack(quantized).to(DEVICE), torch.stack(scales).to(DEVICE), torch.stack(restored)))
    (gate_up, gate_up_scales, restored_gate_up), (down, down_scales, restored_down) = weights
    experts = Experts(gate_up_E2IH=gate_up, down_EHI=down, gate_up_scales=gate_up_scales, down_scales=down_scales)
    return experts, [restored_gate_up, restored_down]


def as_quantized(x_MK: torch.Tensor) -> torch.Tensor:
    q, scales = fp8.quantize_groups(x_MK)
    return q.double() * fp8.spread(scales, (1, 128), (x_MK.shape[0], x_MK.shape[1])).double()


# A tile that files may have: two steps to a scale, columns of more than one scale.
TUNED = as_moe_tile(Tile(block_m=32, block_n=256, block_k=64, group_m=16), is_fp8=True)


@pytest.mark.parametrize("tile", [FEW, SOME, TUNED], ids=["few", "some", "tuned"])
def test_block_fp8_agrees_with_the_reference(tile: MoeTile):
    num_tokens, num_experts, hidden_size, size = 5, 3, 256, 384
    x_TH = random(num_tokens, hidden_size, seed=3)
    # Groups of activations differ in magnitude, too.
    x_TH[:, 128:] *= 8
    experts, (gate_up, down) = quantized_experts(num_experts, hidden_size, size)
    weights_TK, experts_TK = routing(num_tokens, 2, num_experts)
    out_TH = run_experts(x_TH, experts, weights_TK, experts_TK, tile=tile)
    expected_TH = torch.zeros(num_tokens, hidden_size, dtype=torch.float64)
    for token in range(num_tokens):
        for weight, expert in zip(weights_TK[token].tolist(), experts_TK[token].tolist(), strict=True):
            gate_I, up_I = (gate_up[expert].double() @ as_quantized(x_TH[token, None].cpu())[0]).chunk(2)
            gated_I = (F.silu(gate_I) * up_I).to(torch.bfloat16)
            expected_TH[token] += weight * (down[expert].double() @ as_quantized(gated_I[None])[0])
    # If float32 and float64 round to different bf16 numbers, e4m3 may differ in its last place: rarely, and by 2^-4.
    error = (out_TH.double().cpu() - expected_TH).norm() / expected_TH.norm()
    assert error < 0.01


def test_a_token_s_result_does_not_depend_on_the_batch():
    num_experts, hidden_size = 3, 80
    x_TH = random(37, hidden_size, seed=3)
    experts = experts_of(num_experts, hidden_size, 48)
    weights_TK, experts_TK = routing(37, 2, num_experts)
    together = run_experts(x_TH, experts, weights_TK, experts_TK, batch_invariant=True)
    for some in (torch.tensor([36]), torch.tensor([9, 3, 30, 11])):
        alone = run_experts(x_TH[some], experts, weights_TK[some], experts_TK[some], batch_invariant=True)
        assert torch.equal(alone, together[some])


def test_padding_and_other_ranks_pairs_add_nothing():
    num_experts, hidden_size = 4, 64
    x_TH = random(6, hidden_size, seed=3)
    experts = experts_of(num_experts, hidden_size, 32)
    weights_TK, experts_TK = routing(6, 2, num_experts)
    experts_TK[1, 0] = experts_TK[3] = -1
    # Padding may hold anything.
    x_TH[3] = float("nan")
    weights_TK[3] = float("nan")
    out_TH = run_experts(x_TH, experts, weights_TK, experts_TK)
    assert (out_TH[3] == 0).all()
    expected = run_experts_reference(
        x_TH.cpu(), experts.gate_up_E2IH.cpu(), experts.down_EHI.cpu(), weights_TK, experts_TK
    )
    torch.testing.assert_close(out_TH.double().cpu(), expected, rtol=2**-6, atol=2**-7)
    nobody = torch.full_like(experts_TK, -1)
    assert (run_experts(x_TH, experts, weights_TK, nobody) == 0).all()
    assert run_experts(x_TH[:0], experts, weights_TK[:0], experts_TK[:0]).shape == (0, hidden_size)


def test_ranks_of_an_expert_parallel_group_add_up_to_the_whole():
    num_experts, hidden_size = 5, 48
    x_TH = random(7, hidden_size, seed=3)
    experts = experts_of(num_experts, hidden_size, 32)
    logits_TE = random(7, num_experts, seed=4)
    weights_TK, experts_TK = route(logits_TE, top_k=2)
    whole = run_experts(x_TH, experts, weights_TK, experts_TK, tile=FEW)
    parts = torch.zeros(whole.shape, dtype=torch.float32, device=DEVICE)
    for indices in ([0, 1, 2, -1, -1], [-1, -1, -1, 0, 1]):
        own = [expert for expert, index in enumerate(indices) if index >= 0]
        local_E = torch.tensor(indices, dtype=torch.int32, device=DEVICE)
        of_rank = Experts(gate_up_E2IH=experts.gate_up_E2IH[own], down_EHI=experts.down_EHI[own])
        local_weights, local_TK = route(logits_TE, top_k=2, local_experts_E=local_E)
        parts += run_experts(x_TH, of_rank, local_weights, local_TK, num_experts=num_experts)
    # Each rank's part is rounded to 8 bits.
    torch.testing.assert_close(parts, whole.float(), rtol=2**-7, atol=2**-8)


def test_tiles_follow_the_rows_of_an_expert():
    assert [tile_for(pairs, 8) for pairs in (1, 128, 129, 512, 513)] == [FEW, FEW, SOME, SOME, MANY]


def test_weights_that_do_not_go_together_are_refused():
    experts = experts_of(2, 32, 16)
    with pytest.raises(ValueError, match="down_EHI"):
        Experts(gate_up_E2IH=experts.gate_up_E2IH, down_EHI=experts.down_EHI[:, :, :8])
    with pytest.raises(ValueError, match="scales"):
        Experts(gate_up_E2IH=experts.gate_up_E2IH, down_EHI=experts.down_EHI, down_scales=torch.ones(2, 1, 1))
    q = [torch.zeros(shape, dtype=torch.float8_e4m3fn) for shape in ((1, 256, 128), (1, 128, 128))]
    with pytest.raises(ValueError, match=r"gate_up_scales is None; .*\(1, 2, 1\)"):
        Experts(gate_up_E2IH=q[0], down_EHI=q[1])
    with pytest.raises(ValueError, match="float16"):
        run_experts(torch.zeros(1, 32, dtype=torch.float16), experts, torch.ones(1, 1), torch.zeros(1, 1))
