"""Stand-ins for the layers that another pipeline stage computes."""

from collections.abc import Callable

import torch
from torch import nn


class StandIn(nn.Module):
    """Takes the place of a layer. Has the layer's own attributes, by which a model may choose the layer's mask."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        own = {name: value for name, value in vars(layer).items() if not name.startswith("_")}
        self.__dict__.update(own | {"training": False})


class Elsewhere(StandIn):
    """A layer of another stage: passes its input on."""

    def forward(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return hidden_states


class Arrival(StandIn):
    """The layer before this stage's first one: gives the result of the stage before."""

    def __init__(self, layer: nn.Module, incoming: Callable[[], torch.Tensor]) -> None:
        super().__init__(layer)
        self._incoming = incoming

    def forward(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return self._incoming().view_as(hidden_states)


class Departure(StandIn):
    """The layer after this stage's last one: keeps what the next stage needs."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.result = torch.empty(0)

    def forward(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        self.result = hidden_states
        return hidden_states


def layer_list(base: nn.Module, num_layers: int) -> nn.ModuleList:
    """Returns the list of a model's layers. Raises ValueError if there is not exactly one of that length."""
    lists = [
        each
        for each in base.modules()
        if isinstance(each, nn.ModuleList) and len(each) == num_layers and _have_attention(each)
    ]
    if len(lists) != 1:
        raise ValueError(f"{type(base).__name__} has {len(lists)} lists of {num_layers} layers: 1 is expected")
    return lists[0]


def _have_attention(layers: nn.ModuleList) -> bool:
    return all(any(hasattr(each, "layer_idx") for each in layer.modules()) for layer in layers)
