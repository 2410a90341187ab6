"""quantization_config of FP8 checkpoints: fp8 (DeepSeek-V3, Qwen3, AutoFP8, transformers) and fbgemm_fp8."""

import msgspec

from worker.weights.quantization.layers import StoredQuantization
from worker.weights.quantization.scaled import ScaledScheme


class _Skipping(msgspec.Struct, kw_only=True):
    modules_to_not_convert: list[str] | None = None
    ignored_layers: list[str] | None = None

    def skipped(self) -> tuple[str, ...]:
        # These methods never quantize the head, listed or not, and DeepSeek-V3's files do not quantize routers.
        return ("lm_head", "mlp.gate", *(self.modules_to_not_convert or ()), *(self.ignored_layers or ()))


class Fp8(_Skipping, kw_only=True):
    fmt: str = "e4m3"
    weight_block_size: tuple[int, int] | None = None

    def stored(self) -> StoredQuantization:
        if self.fmt != "e4m3":
            raise ValueError(f"fmt={self.fmt!r} is not supported; e4m3 is")
        # For whole tensors, AutoFP8 names the scale weight_scale, transformers weight_scale_inv; both are factors.
        scheme = ScaledScheme(kind="F8_E4M3", block=(0, 0), scale_names=("weight_scale", "weight_scale_inv"))
        if self.weight_block_size is not None:
            block = positive(self.weight_block_size, "weight_block_size")
            scheme = ScaledScheme(kind="F8_E4M3", block=block, scale_names=("weight_scale_inv",))
        return StoredQuantization(schemes=((("Linear",), scheme),), ignored=self.skipped(), description="fp8")


class FbgemmFp8(_Skipping, kw_only=True):
    def stored(self) -> StoredQuantization:
        scheme = ScaledScheme(kind="F8_E4M3", block=(1, 0))
        return StoredQuantization(schemes=((("Linear",), scheme),), ignored=self.skipped(), description="fbgemm_fp8")


def positive(block: tuple[int, int], name: str) -> tuple[int, int]:
    """Returns the sizes of a block. Raises ValueError unless both are at least 1."""
    if min(block) < 1:
        raise ValueError(f"{name}={list(block)} must be positive")
    return block
