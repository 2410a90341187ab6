"""A mixture of experts that the tuner measures: its inputs, and what a right tile computes of them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.gemm.quantize.reference import GROUP, spread
from kernels.gemm.quantize.triton import quantize_blocks, quantize_groups
from kernels.moe.gemm.tiles import as_moe_tile
from kernels.moe.gemm.triton import Experts, run_experts
from kernels.triton_common.tuned_tiles import Tile
from octavo.bench.tune.experts import ExpertsShape


@dataclass(frozen=True)
class ExpertCase:
    """One batch. expected: float32 [M, H]."""

    shape: ExpertsShape
    x_MH: torch.Tensor
    experts: Experts
    weights_MK: torch.Tensor
    experts_MK: torch.Tensor
    expected: torch.Tensor

    @property
    def tolerance(self) -> float:
        """Largest error over the largest output: bfloat16 rounds a number by 2^-9, in each of three places; e4m3 by
        2^-4, where an input of the second GEMM falls on the other side of a step, which few of a sum do."""
        return 2**-5 if self.shape.is_fp8 else 2**-6

    def compute(self, tile: Tile) -> torch.Tensor:
        return run_experts(
            self.x_MH,
            self.experts,
            self.weights_MK,
            self.experts_MK,
            tile=as_moe_tile(tile, is_fp8=self.shape.is_fp8),
        )


def expert_case(M: int, shape: ExpertsShape, device: str) -> ExpertCase:
    """Tokens go to top_k different experts each, drawn at random."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*sizes: int) -> torch.Tensor:
        numbers = torch.randn(*sizes, generator=generator, device=device, dtype=torch.float32)
        return (numbers * sizes[-1] ** -0.5).to(torch.bfloat16)

    count, size, hidden = shape.num_experts, shape.size, shape.hidden_size
    x_MH = random(M, hidden) * hidden**0.5
    gate_up, down = random(count, 2 * size, hidden), random(count, hidden, size)
    ranks_ME = torch.rand(M, count, generator=generator, device=device)
    weights_MK, experts_MK = ranks_ME.topk(shape.top_k)
    experts = Experts(gate_up_E2IH=gate_up, down_EHI=down)
    restored = [gate_up, down]
    rounded: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.float
    if shape.is_fp8:
        packed = [[quantize_blocks(each) for each in weight] for weight in restored]
        restored = [
            torch.stack([q.float() * spread(scales, (GROUP, GROUP), (q.shape[0], q.shape[1])) for q, scales in weight])
            for weight in packed
        ]
        (gate_up, gate_up_scales), (down, down_scales) = (
            map(torch.stack, zip(*weight, strict=True)) for weight in packed
        )
        experts = Experts(
            gate_up_E2IH=gate_up, down_EHI=down, gate_up_scales=gate_up_scales, down_scales=down_scales.contiguous()
        )
        rounded = _as_quantized
    expected = torch.zeros(M, hidden, device=device)
    for expert in range(count):
        tokens, places = (experts_MK == expert).nonzero(as_tuple=True)
        if not len(tokens):
            continue
        gate, up = (rounded(x_MH[tokens].contiguous()) @ restored[0][expert].float().t()).chunk(2, dim=-1)
        gated = (torch.nn.functional.silu(gate) * up).to(torch.bfloat16)
        out = (rounded(gated.contiguous()) @ restored[1][expert].float().t()).to(torch.bfloat16).float()
        expected.index_add_(0, tokens, out * weights_MK[tokens, places, None].float())
    return ExpertCase(
        shape=shape,
        x_MH=x_MH,
        experts=experts,
        weights_MK=weights_MK.float(),
        experts_MK=experts_MK.to(torch.int32),
        expected=expected,
    )


def _as_quantized(x_MK: torch.Tensor) -> torch.Tensor:
    q, scales = quantize_groups(x_MK)
    return q.float() * spread(scales, (1, GROUP), (x_MK.shape[0], x_MK.shape[1]))
