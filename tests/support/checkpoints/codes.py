"""Writes weights as bitsandbytes and MXFP4 store codes of numbers, and reads them back by the formulas that the
libraries publish."""

import json

import torch

Tensors = dict[str, torch.Tensor]
# The codes of bitsandbytes' nf4 and fp4.
NF4 = torch.tensor(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ]
)
FP4 = torch.tensor([0, 0.0625, 8, 12, 4, 6, 2, 3, -0.0, -0.0625, -8, -12, -4, -6, -2, -3]) / 12
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def four_bits(
    layer: str, weight: torch.Tensor, kind: str, *, nested: bool = False, block: int = 64, dtype: str = "bfloat16"
) -> tuple[Tensors, torch.Tensor]:
    """The tensors of bitsandbytes' 4-bit layers, and codes * absmax in dtype. nested: double quantization."""
    codes, numbers = (NF4 if kind == "nf4" else FP4), weight.float().flatten()
    padded = torch.nn.functional.pad(numbers, (0, -len(numbers) % block)).view(-1, block)
    factors = padded.abs().amax(1)
    state: dict[str, object] = {"quant_type": kind, "blocksize": block, "dtype": dtype, "shape": list(weight.shape)}
    tensors: Tensors = {}
    name = f"{layer}.weight"
    if nested:
        # As many codes as a byte has, 256, over the range of factors less their mean.
        offset, size, map_ = float(factors.mean()), 256, torch.linspace(-1, 1, 256)
        rest = torch.nn.functional.pad(factors - offset, (0, -len(factors) % size)).view(-1, size)
        outer = rest.abs().amax(1)
        bytes_ = (rest[:, :, None] / outer[:, None, None] - map_).abs().argmin(2).flatten()[: len(factors)]
        tensors[f"{name}.nested_absmax"], tensors[f"{name}.nested_quant_map"] = outer, map_
        tensors[f"{name}.absmax"] = bytes_.to(torch.uint8)
        state |= {"nested_blocksize": size, "nested_dtype": "float32", "nested_offset": offset}
        factors = map_[bytes_] * outer.repeat_interleave(size)[: len(factors)] + offset
    else:
        tensors[f"{name}.absmax"] = factors
    indices = (padded[:, :, None] / factors[:, None, None] - codes).abs().argmin(2)
    even, odd = torch.nn.functional.pad(indices.flatten()[: len(numbers)], (0, len(numbers) % 2)).view(-1, 2).T
    tensors[name] = (even << 4 | odd).to(torch.uint8).view(-1, 1)
    tensors[f"{name}.quant_map"] = codes.clone()
    text = json.dumps(state).encode()
    tensors[f"{name}.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text), dtype=torch.uint8)
    floats = (codes[indices] * factors[:, None]).flatten()[: len(numbers)].view(weight.shape)
    return tensors, floats.to(getattr(torch, dtype))


def llm_int8(layer: str, weight_OI: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """The tensors of bitsandbytes' LLM.int8, and integer * SCB / 127, multiplied in that order."""
    largest_O = weight_OI.float().abs().amax(1)
    integers_OI = (weight_OI.float() * 127 / largest_O[:, None]).round().to(torch.int8)
    tensors = {
        f"{layer}.weight": integers_OI,
        f"{layer}.SCB": largest_O,
        f"{layer}.weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return tensors, integers_OI * largest_O[:, None] * 7.874015718698502e-3


def mxfp4(weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks uint8 [O, I / 32, 16] and scales uint8 [O, I / 32] as gpt-oss has them, and the floats that they stand
    for: ldexp(number, scale - 127)."""
    groups = weight_OI.float().unflatten(1, (-1, 32))
    exponents = (groups.abs().amax(2).clamp(min=2.0**-100).log2().floor() - 2).clamp(-127, 127)
    scaled = groups / torch.exp2(exponents)[:, :, None]
    indices = (scaled[..., None] - E2M1).abs().argmin(3)
    blocks = (indices[:, :, 0::2] | indices[:, :, 1::2] << 4).to(torch.uint8)
    floats = torch.ldexp(E2M1[indices], exponents[:, :, None].int()).flatten(1)
    return blocks, (exponents + 127).to(torch.uint8), floats
