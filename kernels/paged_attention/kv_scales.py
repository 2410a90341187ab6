"""What a KV cache of e4m3 is multiplied with."""

from typing import NamedTuple

import torch


class KVScales(NamedTuple):
    """One layer's: number = scale * stored. float32 [1], or [K] of a scale a KV head, on the cache's device."""

    k: torch.Tensor
    v: torch.Tensor
