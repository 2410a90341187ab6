"""RMS norm on a CPU."""

from functools import lru_cache

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, computed in float32, returned in `dtype`.

    x: [..., N] of any float dtype. weight: float32, [N] or any shape that broadcasts against x.
    """
    x = x.float()
    # sqrt(mean(x^2) + eps) = hypot(|x|, sqrt(N eps)) / sqrt(N): five ops, 9 us for a row and 22 us for 64 rows of 576,
    # against 16 and 32 for F.rms_norm (AVX2, 1 thread).
    root_size, root_eps = _constants(x.shape[-1], eps)
    root_mean_square = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), root_eps).div_(root_size)
    y = (x / root_mean_square).mul_(weight)
    return y if dtype is torch.float32 else y.to(dtype)


@lru_cache
def _constants(size: int, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """sqrt(N) and sqrt(N eps) as tensors: from a Python number, each op would make one anew."""
    return torch.tensor(size**0.5), torch.tensor((size * eps) ** 0.5)
