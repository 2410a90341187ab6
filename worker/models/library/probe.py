"""Runs a model of transformers without numbers, to find out before any weight is read if its steps can be computed in
parts and beside others' tokens, and what its layers ask of attention.

A step's tokens come as one sequence of T tokens, of several requests. Apart from attention, a model must therefore
treat each token by itself. The probe watches each operation of the library's modules: a sum over tokens, a convolution
or a cut along tokens shows a model that does not.
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from worker.models.library.attention import Asked, asking
from worker.models.library.classes import RefusedError
from worker.models.library.modules import OctavoLinear

# The most numbers that torch's loops compute at once: two vectors of AVX-512. A function's remaining numbers at the end
# of a tensor are computed one by one, by another algorithm, which may round differently.
_AT_ONCE = 32


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Functions whose vector form rounds differently from their scalar form. Others round each result correctly.
_ROUNDED_BY_FORM = _names("""
    cos sin tan tanh sigmoid silu gelu elu selu celu mish softplus hardswish exp exp2 expm1 log log2 log10 log1p logit
    log_sigmoid_forward erf erfc pow sinh cosh asin acos atan
""")
_PRODUCTS = _names("""
    mm bmm addmm baddbmm addbmm addmv mv dot addr convolution einsum _grouped_mm _scaled_dot_product_attention_math
    _scaled_dot_product_flash_attention_for_cpu
""")
# Operations over one or more dims; without dims they are over all.
_REDUCING = _names("""
    sum mean amax amin max min prod std var var_mean std_mean argmax argmin any all norm linalg_vector_norm logsumexp
    _softmax _log_softmax cumsum cumprod cummax cummin logcumsumexp sort topk median mode roll flip kthvalue
""")
_CUTTING = _names("slice narrow select unfold")
# Probes run with a number of tokens that is no size of the model.
_PRIMES = (29, 31, 37, 41, 43, 47, 53, 59, 61, 67)


@dataclass(slots=True)
class Watched:
    """The findings of a probe."""

    asked: Asked = field(default_factory=Asked)
    row_multiple: int = 1
    # Calls of linear layers in order: name, the input and its version.
    calls: list[tuple[str, torch.Tensor, int]] = field(default_factory=list)
    result: torch.Tensor | None = None


class _Watch(TorchDispatchMode):
    def __init__(self, num_tokens: int, watched: Watched) -> None:
        super().__init__()
        self._num_tokens, self._watched = num_tokens, watched

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.removesuffix("_") or func.overloadpacket.__name__
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        if name in _PRODUCTS and not _is_outer(name, tensors):
            raise RefusedError(f"it multiplies matrices outside of linear layers (aten.{name})")
        if name in _REDUCING and tensors and self._mixes(func, args, kwargs or {}, tensors[0]):
            raise RefusedError(f"aten.{name} of {list(tensors[0].shape)} mixes the tokens of a step")
        if name in _CUTTING and tensors and self._cuts(tensors[0], result):
            raise RefusedError(f"aten.{name} of {list(tensors[0].shape)} takes some of a step's tokens")
        if name in _ROUNDED_BY_FORM and isinstance(result, torch.Tensor) and result.is_floating_point():
            # The multiple of rows that leaves no remaining numbers at the end.
            per_row = result.numel() // self._num_tokens
            needed = _AT_ONCE // math.gcd(_AT_ONCE, max(per_row, 1))
            self._watched.row_multiple = math.lcm(self._watched.row_multiple, needed)
        return result

    def _mixes(self, func: Any, args: Any, kwargs: dict[str, Any], x: torch.Tensor) -> bool:
        if self._num_tokens not in x.shape:
            return False
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        defaults = {argument.name: argument.default_value for argument in func._schema.arguments}
        dims = next((given.get(name, defaults.get(name)) for name in ("dim", "dims") if name in names), None)
        if dims is None or dims == []:
            return True
        dims = [dims] if isinstance(dims, int) else dims
        return any(x.shape[dim] == self._num_tokens for dim in dims)

    def _cuts(self, x: torch.Tensor, result: torch.Tensor) -> bool:
        has = self._num_tokens in x.shape
        return has and result.numel() > 0 and not result.numel() % 1 and self._num_tokens not in result.shape


def _is_outer(name: str, tensors: list[torch.Tensor]) -> bool:
    """Returns True for a product with one term in each sum, such as positions and frequencies: it is exact."""
    return name in ("mm", "bmm") and tensors[0].shape[-1] == 1


def probe(base: nn.Module) -> Watched:
    """base: an exchanged model on the meta device, without its head. Raises RefusedError."""
    watched = Watched()
    sizes = {size for parameter in base.parameters() for size in parameter.shape}
    num_tokens = next(prime for prime in _PRIMES if prime not in sizes)

    def watch(name: str, module: OctavoLinear) -> None:
        def note(x: torch.Tensor) -> None:
            watched.calls.append((name, x, x._version))

        module.octavo_watch = note

    linears = {name: module for name, module in base.named_modules() if isinstance(module, OctavoLinear)}
    for name, module in linears.items():
        watch(name, module)
    asking(watched.asked)
    ids = torch.zeros(1, num_tokens, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad(), _Watch(num_tokens, watched):
            output = base(
                input_ids=ids,
                position_ids=torch.zeros_like(ids),
                attention_mask=torch.ones_like(ids),
                use_cache=False,
            )
    except RefusedError:
        raise
    except Exception as error:  # whatever a model's own code raises without numbers
        first = str(error).partition("\n")[0]
        raise RefusedError(
            f"its forward pass depends on numbers, or does not run without a cache: {type(error).__name__}: {first}"
        ) from error
    finally:
        asking(None)
        for module in linears.values():
            module.octavo_watch = None
    watched.result = output[0] if isinstance(output, tuple) else output.last_hidden_state
    return watched


def fusible(watched: Watched, linears: dict[str, nn.Module]) -> tuple[tuple[str, ...], ...]:
    """Returns the groups of linear layers of one module that are called one after the other with the same input, which
    nothing changes in between. Each is called once in a step."""
    times = Counter(name for name, _, _ in watched.calls)

    def key(call: tuple[str, torch.Tensor, int]) -> tuple[Any, ...]:
        name, x, version = call
        module = linears[name]
        assert isinstance(module, nn.Linear)
        return id(x), version, name.rpartition(".")[0], module.bias is None, times[name]

    groups = (tuple(name for name, _, _ in calls) for _, calls in groupby(watched.calls, key))
    return tuple(group for group in groups if len(group) > 1 and all(times[name] == 1 for name in group))
