"""Reads the tensor-parallel plan that transformers has for a model: how ranks divide each linear layer."""

import re
from collections.abc import Callable, Iterable
from enum import Enum
from functools import partial
from types import EllipsisType

import torch
from torch import nn

from kernels.shard import Shard
from worker.layers.forward_context import current

# Maps contiguous [T, I] to [T, O].
Product = Callable[[torch.Tensor], torch.Tensor]


class Division(Enum):
    """How the ranks share one linear layer."""

    # Each rank computes all of it.
    WHOLE = "whole"
    # Each rank has some outputs, and gives them to the layer after it.
    OUTPUTS = "colwise"
    # As OUTPUTS; each rank then gets the outputs of all.
    GATHERED = "colwise_gather_output"
    # Outputs of two layers in one: each rank has some of both.
    PAIRED = "packed_colwise"
    # Each rank has some inputs, which are what it has computed; results are summed.
    INPUTS = "rowwise"
    # As INPUTS; each rank takes its part of the inputs of all.
    TAKEN = "rowwise_split_input"


# Styles that change the training only, or state what the parts of a module already do.
_NO_CHANGE = frozenset(
    {"replicated_with_grad_allreduce", "mla_kv_a_proj", "replicate", "moe_tp_experts", "local_params"}
)
_EMBEDDINGS = frozenset({"embedding_rowwise", "embedding_colwise"})


def divisions(base: nn.Module, names: Iterable[str], shard: Shard) -> dict[str, Division]:
    """Returns how each of `names`, modules or parameters of `base`, is divided. Raises ValueError if the model has no
    plan, or one that this backend does not compute."""
    if shard.size == 1:
        return dict.fromkeys(names, Division.WHOLE)
    plan = getattr(base.config, "base_model_tp_plan", None)  # pyright: ignore[reportAttributeAccessIssue]
    what = type(base).__name__
    if not plan:
        raise ValueError(f"tensor_parallel_size={shard.size}: transformers has no plan to divide {what}; use 1")
    unknown = sorted(set(plan.values()) - _NO_CHANGE - _EMBEDDINGS - {each.value for each in Division})
    if unknown:
        raise ValueError(
            f"tensor_parallel_size={shard.size}: transformers divides {what} by {', '.join(unknown)}, which is not "
            "supported; use 1"
        )
    found: dict[str, Division] = {}
    for name in names:
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name), "")
        found[name] = Division.WHOLE if style in _NO_CHANGE | {""} | _EMBEDDINGS else Division(style)
    return found


def part_of(base: nn.Module, name: str, parameter: torch.Tensor, shard: Shard) -> slice | EllipsisType:
    """Returns this rank's part of a small parameter, such as the sinks of its heads, along the first dim. name: within
    `base`. Raises ValueError as `divisions` does."""
    way = divisions(base, [name], shard)[name]
    if way is Division.WHOLE:
        return ...
    if way is not Division.OUTPUTS:
        raise ValueError(f"tensor_parallel_size={shard.size}: {name} is divided by {way.value}, not colwise; use 1")
    return shard.of(len(parameter), name)


def check_heads(num_heads: int, num_kv_heads: int, shard: Shard) -> None:
    """Raises ValueError, naming the option, if the plan's ranks would split a head."""
    if num_heads % shard.size or num_kv_heads % shard.size:
        valid = [each for each in range(1, num_kv_heads + 1) if num_heads % each == num_kv_heads % each == 0]
        raise ValueError(
            f"tensor_parallel_size={shard.size} does not divide {num_heads} heads on {num_kv_heads} KV heads, as "
            f"model_impl=transformers needs; {', '.join(map(str, valid))} do"
        )


def divided(product: Product, way: Division, inputs: slice | None) -> Product:
    """Adds to a rank's product what it takes from the others. inputs: this rank's, for Division.TAKEN."""
    if way in (Division.WHOLE, Division.OUTPUTS, Division.PAIRED):
        return product
    if way is Division.GATHERED:

        def gathered(x_TI: torch.Tensor) -> torch.Tensor:
            return current().group.gather(product(x_TI)).transpose(0, 1).flatten(1)

        return gathered
    return partial(_summed, product, inputs if way is Division.TAKEN else None)


def _summed(product: Product, inputs: slice | None, x_TI: torch.Tensor) -> torch.Tensor:
    y_TO = product(x_TI if inputs is None else x_TI[:, inputs])
    current().group.sum_(y_TO)
    return y_TO
