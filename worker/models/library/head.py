"""The output head of a model of transformers: its linear layer is Octavo's; what comes after it, such as a scale or a
soft cap of the logits, is the library's.

Legend: S tokens whose logits are wanted, E hidden size, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from kernels.backend import Backend
from kernels.linear import PackedLinear, Stream
from kernels.sampling import TokenMasks, apply_masks, greedy
from worker.layers.head import OutputHead
from worker.models.library.classes import RefusedError
from worker.parallel.groups import Group

# Functions round a row in the same way wherever it is if numbers before it are a multiple of this.
_ROW_MULTIPLE = 32


class _Output:
    """A base model's output, as far as heads read it: all but the hidden states is None."""

    def __init__(self, hidden_1SE: torch.Tensor) -> None:
        self.last_hidden_state = hidden_1SE

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]


class _Base(nn.Module):
    """Stands for the model before the head: returns what it was given."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.given = config, _Output(torch.empty(0))
        # Some heads call a part of the base model.
        self.__dict__["decoder"] = self

    def forward(self, *args: object, **kwargs: object) -> _Output:
        return self.given


class _Linear(nn.Module):
    """Stands for the head's linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.product: Callable[[torch.Tensor], torch.Tensor] = torch.clone
        self.input = torch.empty(0)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.input = input
        return self.product(input[0])[None]


class AroundHead:
    """The steps of a library's causal language model before and after the linear layer of its head."""

    def __init__(self, model: nn.Module, base_name: str, head_name: str) -> None:
        """model: its base model and its linear layer are replaced. Raises RefusedError if the head needs more than
        hidden states."""
        self._model, self._base, self._linear = model, _Base(model.config), _Linear()
        setattr(model, base_name, self._base)
        setattr(model, head_name, self._linear)
        sample = torch.linspace(-60.0, 60.0, 64)[None]
        # True if the logits are those of the linear layer.
        try:
            self.is_identity = torch.equal(self(sample, torch.clone), sample)
        except Exception as error:  # whatever a model's own code raises without the rest of the model
            raise RefusedError(f"its head needs more than hidden states: {type(error).__name__}: {error}") from error
        self.is_identity = self.is_identity and torch.equal(self._linear.input[0, :1], sample)

    def __call__(self, hidden_SE: torch.Tensor, product: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Returns float32 [S, V]. product: of the linear layer, for any number of rows."""
        num_rows = len(hidden_SE)
        missing = -num_rows % _ROW_MULTIPLE
        padded = functional.pad(hidden_SE, (0, 0, 0, missing)) if missing else hidden_SE
        self._base.given, self._linear.product = _Output(padded[None]), product
        # Some heads read the number of tokens here.
        blank_ids = torch.zeros(1, len(padded), dtype=torch.int64)
        return self._model(input_ids=blank_ids, use_cache=False).logits[0][:num_rows].float()


class LibraryHead(OutputHead):
    """An output head without a norm, which the library has computed before."""

    def __init__(self, linear: PackedLinear, vocab_size: int, backend: Backend, around: AroundHead) -> None:
        super().__init__(linear, vocab_size, backend)
        self._around = around

    def logits(self, hidden_SE: Stream, group: Group, out: torch.Tensor | None = None) -> torch.Tensor:
        if self._around.is_identity or not len(hidden_SE):
            return super().logits(hidden_SE, group, out)
        assert isinstance(hidden_SE, torch.Tensor)
        whole = super().logits
        return self._around(hidden_SE, lambda x_SE: whole(x_SE.contiguous(), group))

    def argmax(
        self, hidden_SE: Stream, out: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._around.is_identity:
            return super().argmax(hidden_SE, out)
        ids_S, largest_S = map(torch.from_numpy, greedy(self._part(hidden_SE).numpy()))
        return (ids_S, largest_S) if out is None else (out[0].copy_(ids_S), out[1].copy_(largest_S))

    def masked_argmax(self, hidden_SE: Stream, masks: TokenMasks) -> tuple[torch.Tensor, torch.Tensor]:
        if self._around.is_identity:
            return super().masked_argmax(hidden_SE, masks)
        logits_SV = self._part(hidden_SE).numpy()
        apply_masks(logits_SV, masks)
        ids_S, largest_S = greedy(logits_SV)
        return torch.from_numpy(ids_S), torch.from_numpy(largest_S)

    def _part(self, hidden_SE: Stream) -> torch.Tensor:
        """This rank's logits: what comes after the linear layer takes each number by itself."""
        assert isinstance(hidden_SE, torch.Tensor)
        return self._around(hidden_SE, lambda x_SE: self._linear(x_SE.contiguous()).float()).contiguous()
