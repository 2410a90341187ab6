"""Exchanges modules of transformers, in place, for ones that compute with Octavo's kernels.

An exchanged module keeps its name, its place and its attributes; only its class changes. On the meta device, exchanged
modules give tensors of the right shape, so that a model can be probed before there are weights.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from kernels.linear import PackedLinear
from worker.layers.embedding import Embedding
from worker.layers.forward_context import current
from worker.models.library.classes import RefusedError
from worker.models.library.parallel import Product

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The name of our experts function in the library's registry.
EXPERTS = "octavo"


class Linears:
    """One packed linear layer behind one or more modules with the same input. The first module that gets an input
    computes the outputs of all."""

    def __init__(self, widths: list[int]) -> None:
        self._widths = widths
        # Set where there are weights.
        self.product: Product | None = None
        self._input: torch.Tensor | None = None
        self._outputs: Sequence[torch.Tensor] = ()

    def __call__(self, x: torch.Tensor, index: int) -> torch.Tensor:
        if len(self._widths) == 1:
            return self._compute(x)
        if x is not self._input:
            self._input, self._outputs = x, self._compute(x).split_with_sizes(self._widths, dim=-1)
        output = self._outputs[index]
        if index == len(self._widths) - 1:
            # The last member is the last to be called; see worker.models.library.probe.
            self._input, self._outputs = None, ()
        return output

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        if self.product is None:
            return x.new_empty(*x.shape[:-1], sum(self._widths))
        y_TO = self.product(x.reshape(-1, x.shape[-1]))
        return y_TO.view(*x.shape[:-1], y_TO.shape[-1])

    def split(self, widths: list[int]) -> None:
        """Sets the widths of the outputs, where a rank has a part of them."""
        self._widths = widths


class OctavoLinear(nn.Linear):
    """A linear layer, by itself or as one of several that are computed as one."""

    octavo: Linears
    octavo_index: int
    # Called with the input; for probes.
    octavo_watch: Callable[[torch.Tensor], None] | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.octavo_watch is not None:
            self.octavo_watch(input)
        return self.octavo(input, self.octavo_index)

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        # nn.Module's own call looks for hooks, which there are none of.
        return self.forward(input)


class OctavoEmbedding(nn.Embedding):
    """The token embeddings."""

    octavo: Embedding | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.octavo is None:
            shape = (*input.shape, self.embedding_dim)
            # A stage after the first has no embeddings: its first layer takes the place of what comes before.
            return torch.zeros(shape) if not input.is_meta else torch.empty(shape, device="meta")
        x_TE = self.octavo(input.flatten(), current().workspace)
        assert isinstance(x_TE, torch.Tensor)
        return x_TE.view(*input.shape, self.embedding_dim)


class LibraryWeight(torch.Tensor):
    """A weight that a module gives to torch.nn.functional.linear itself, as many routers do."""

    octavo: Linears
    # The linear function has got it.
    is_used: bool

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.linear and isinstance(args[1], cls):
            return _linear(*args, **kwargs)
        if func in _CASTS and isinstance(args[0], cls):
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


_CASTS = frozenset({torch.Tensor.to, torch.Tensor.float, torch.Tensor.type, torch.Tensor.contiguous})


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    assert isinstance(weight, LibraryWeight)
    weight.is_used = True
    y = weight.octavo(x, 0)
    return y if bias is None else y + bias


def _below(cls: type[nn.Module], own: type[nn.Module]) -> type[nn.Module]:
    """Returns a class like `cls` whose calls of super() arrive at `own`, in place of the class of torch."""
    bases: tuple[Any, ...] = (cls, own)
    return type(cls.__name__, bases, {})


def exchange_linear(module: nn.Module) -> None:
    """Changes the class of a linear layer, which may be of a subclass of nn.Linear."""
    cls = type(module)
    if is_transposed(module):
        holder: Any = module
        holder.in_features, holder.out_features = holder.nx, holder.nf
        module.__class__ = OctavoLinear
    else:
        # In a subclass, super().forward then computes with Octavo's kernels.
        module.__class__ = OctavoLinear if cls is nn.Linear else _below(cls, OctavoLinear)
    assert isinstance(module, OctavoLinear)
    module.__dict__.update(octavo=Linears([module.out_features]), octavo_index=0, octavo_watch=None)


def exchange_embedding(module: nn.Module) -> None:
    cls = type(module)
    module.__class__ = OctavoEmbedding if cls is nn.Embedding else _below(cls, OctavoEmbedding)
    module.__dict__.update(octavo=None)


def exchange_weight(module: nn.Module, name: str) -> LibraryWeight:
    """Exchanges a parameter [O, I]; its module must use it only as the weight of a linear function."""
    weight = module._parameters.pop(name)
    assert weight is not None
    exchanged = torch.empty(weight.shape, device="meta").as_subclass(LibraryWeight)
    exchanged.octavo, exchanged.is_used = Linears([len(weight)]), False
    module.__dict__[name] = exchanged
    return exchanged


def fuse(modules: Sequence[OctavoLinear]) -> Linears:
    """Makes exchanged linear layers be computed as one."""
    linears = Linears([module.out_features for module in modules])
    for index, module in enumerate(modules):
        module.__dict__.update(octavo=linears, octavo_index=index)
    return linears


def _conv1d() -> type[nn.Module]:
    from transformers.pytorch_utils import Conv1D

    return Conv1D


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module) is _conv1d()


def is_transposed(module: nn.Module) -> bool:
    """Returns True if a linear layer stores its weight as [inputs, outputs]."""
    return type(module) is _conv1d()


def is_experts(module: nn.Module) -> bool:
    """Returns True for experts that go through the library's experts interface."""
    return hasattr(module, "is_concatenated") and hasattr(module, "is_transposed") and hasattr(module, "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """A causal language model whose modules are exchanged, on the meta device. Names begin at the whole model."""

    model: "PreTrainedModel"
    base: "PreTrainedModel"
    # Attributes of the model.
    base_name: str
    head_name: str
    # The name of the input embeddings.
    embedding_name: str
    linears: Mapping[str, OctavoLinear]
    # Weights that modules give to the linear function themselves.
    weights: Mapping[str, LibraryWeight]
    experts: Mapping[str, nn.Module]

    @property
    def head(self) -> nn.Linear:
        return getattr(self.model, self.head_name)

    @property
    def embedding(self) -> OctavoEmbedding:
        embedding = self.model.get_submodule(self.embedding_name)
        assert isinstance(embedding, OctavoEmbedding)
        return embedding


def exchange(model: "PreTrainedModel", weights_of_products: Collection[str] | None = None) -> Exchanged:
    """Exchanges the modules of a model before its head. weights_of_products: full names of weights that modules give to
    the linear function themselves; None: all that might be. Raises RefusedError if it is not built like a decoder."""
    base_name, head = model.base_model_prefix, model.get_output_embeddings()
    head_name = next((name for name, child in model.named_children() if child is head), None)
    base = getattr(model, base_name, None)
    names = {id(module): name for name, module in model.named_modules()}
    embedding = model.get_input_embeddings()
    if not (isinstance(head, nn.Linear) and head_name and isinstance(base, nn.Module) and base is not model):
        raise RefusedError(f"{type(model).__name__} is not a model with a linear head after it")
    if not isinstance(embedding, nn.Embedding):
        raise RefusedError(f"{type(model).__name__} has no embeddings of tokens")
    parts = (f"{base_name}.", f"{head_name}.")
    others = [name for name, _ in model.named_parameters() if not name.startswith(parts)]
    if others:
        raise RefusedError(f"{type(model).__name__} has layers between its base model and its head ({others[0]})")
    whole: Any = base
    exchange_embedding(embedding)
    experts = {f"{base_name}.{name}": module for name, module in base.named_modules() if is_experts(module)}
    linears: dict[str, OctavoLinear] = {}
    weights: dict[str, LibraryWeight] = {}
    for name, module in list(base.named_modules()):
        full = f"{base_name}.{name}"
        if is_linear(module):
            exchange_linear(module)
            assert isinstance(module, OctavoLinear)
            linears[full] = module
        elif not isinstance(module, nn.Embedding):
            for each, parameter in list(module.named_parameters(recurse=False)):
                own = f"{full}.{each}"
                if parameter.ndim == 2 and (weights_of_products is None or own in weights_of_products):
                    weights[own] = exchange_weight(module, each)
    for module in experts.values():
        config: Any = module.config
        config._experts_implementation = EXPERTS
    return Exchanged(
        model=model,
        base=whole,
        base_name=base_name,
        head_name=head_name,
        embedding_name=names[id(embedding)],
        linears=linears,
        weights=weights,
        experts=experts,
    )


def product_of(packed: PackedLinear, dtype: torch.dtype) -> Product:
    """Returns the function of a packed layer. dtype: the backend's compute_dtype; results are float32."""

    def product(x_TI: torch.Tensor) -> torch.Tensor:
        return packed(x_TI.to(dtype).contiguous()).float()

    def product_of_floats(x_TI: torch.Tensor) -> torch.Tensor:
        return packed(x_TI.contiguous())

    return product_of_floats if dtype is torch.float32 else product
