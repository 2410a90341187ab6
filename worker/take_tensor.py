"""How layers get their weights, wherever those come from."""

from collections.abc import Callable

import torch

Shape = tuple[int, ...]
# Gives a tensor by its Hugging Face name, in the model's dtype, as a tensor that the caller may keep.
TakeTensor = Callable[[str], torch.Tensor]
