"""RMS norm on a CPU."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, computed in float32, returned in `dtype`.

    x: [..., N] of any float dtype. weight: float32, [N] or any shape that broadcasts against x.
    """
    x = x.float()
    # Half the time of F.rms_norm, which is a chain of plain ops with several passes over x.
    square_sum = torch.linalg.vecdot(x, x).unsqueeze_(-1)
    scale = square_sum.mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    y = (x * scale).mul_(weight)
    return y if dtype is torch.float32 else y.to(dtype)
