"""The tensors of a model of transformers: how this backend names and shapes them, and where the library has them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from torch import nn

from worker.model_config import LibraryConfig
from worker.models.library.attention import PAGED, register
from worker.models.library.classes import meta_model
from worker.models.library.modules import is_experts, is_transposed
from worker.weights.reader import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Presented:
    """One tensor as a reader gives it. target: its name in the library's model. expert: it is this expert's part of a
    tensor of all experts. transposed: the library has it as [inputs, outputs]."""

    target: str
    shape: Shape
    expert: int | None = None
    transposed: bool = False


# Parameters of experts, with a first dim of experts: the weights, and their biases.
EXPERT_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")


def expert_tensor(prefix: str, expert: int, name: str, kind: str = "weight") -> str:
    """Returns the name of one expert's weight or bias."""
    return f"{prefix}.{expert}.{name}.{kind}"


@lru_cache(maxsize=4)
def tensors_of(library: LibraryConfig) -> Mapping[str, Presented]:
    """Returns a model's tensors by the names that this backend gives them."""
    register()
    model = meta_model(library, PAGED)
    tied = tied_names(model)
    modules = dict(model.named_modules())
    found: dict[str, Presented] = {}
    for target, tensor in model.state_dict(keep_vars=True).items():
        prefix, _, name = target.rpartition(".")
        module = modules[prefix]
        shape = tuple(tensor.shape)
        if target in tied:
            continue
        if is_experts(module) and name.removesuffix("_bias") in EXPERT_WEIGHTS:
            found |= _of_experts(target, module, shape)
        elif is_transposed(module) and name == "weight":
            found[target] = Presented(target=target, shape=shape[::-1], transposed=True)
        else:
            found[target] = Presented(target=target, shape=shape)
    return found


def _of_experts(target: str, module: nn.Module, shape: Shape) -> Iterator[tuple[str, Presented]]:
    prefix, _, name = target.rpartition(".")
    is_bias = name.endswith("_bias")
    transposed = bool(module.is_transposed) and not is_bias
    own_shape = shape[:0:-1] if transposed else shape[1:]
    for expert in range(shape[0]):
        own = expert_tensor(prefix, expert, name.removesuffix("_bias"), "bias" if is_bias else "weight")
        yield own, Presented(target=target, shape=own_shape, expert=expert, transposed=transposed)


def tied_names(model: nn.Module) -> Mapping[str, str]:
    """Returns the names of tensors that are others' under another name, mapped to those."""
    if not getattr(model.config, "tie_word_embeddings", False):
        return {}
    return dict(getattr(model, "_tied_weights_keys", None) or {})
