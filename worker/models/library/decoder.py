"""A decoder that the modules of transformers compute, with Octavo's linear layers, experts, attention, embeddings and
head in them.

Legend: T tokens of the step, E hidden size.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from kernels.backend import Backend
from kernels.linear import PackedLinear, Stream
from worker.layers.attention import QueryTemperature
from worker.layers.embedding import Embedding
from worker.layers.forward_context import current
from worker.layers.head import OutputHead
from worker.layers.linear import load_linear
from worker.layers.rotary import Rotary
from worker.model_config import LibraryConfig, ModelConfig
from worker.models.decoder import Model
from worker.models.library.attention import PAGED, PagedAttention, register
from worker.models.library.classes import meta_model
from worker.models.library.experts import Experts, register_experts
from worker.models.library.formulas.exchange import Formulas
from worker.models.library.formulas.norm import exchanged_norm
from worker.models.library.head import AroundHead, LibraryHead
from worker.models.library.modules import Exchanged, OctavoLinear, exchange, fuse, product_of
from worker.models.library.parallel import Division, check_heads, divided, divisions, part_of
from worker.models.library.stages import Arrival, Departure, Elsewhere, layer_list
from worker.models.library.tensors import tensors_of, tied_names
from worker.weights.reader import Shape, WeightReader, WeightsError


class LibraryDecoder(Model):
    """A model, or one stage of it. Activations are float32 on a CPU, whatever dtype the weights have."""

    def __init__(self, config: ModelConfig, reader: WeightReader, backend: Backend) -> None:
        library = _checked(config, backend)
        self.config, self.backend = config, backend
        # The library has rope and temperatures of its own.
        self.rotary, self.query_temperature = Rotary((), 2, backend), QueryTemperature(config, backend)
        self._row_multiple = library.row_multiple
        register()
        register_experts()
        exchanged = exchange(meta_model(library, PAGED), library.weights)
        self._base, self._layers = exchanged.base, backend.stage.layers(config.num_layers)
        self._departure = self._cut_stages(layer_list(self._base, config.num_layers), exchanged)
        self._num_bytes = 0
        self._embed: Embedding | None = None
        if backend.stage.is_first:
            self._embed = Embedding(reader(f"{exchanged.embedding_name}.weight"), backend)
            exchanged.embedding.octavo = self._embed
            self._num_bytes += self._embed.num_bytes
        here = {name for name, _ in exchanged.model.named_modules()}
        self._load_others(exchanged, reader)
        self._exchange_norms()
        self._load_linears(exchanged, here, library, reader)
        self._load_experts(exchanged, here, reader)
        attention = PagedAttention(config, backend)
        for module in self._base.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                module.__dict__["octavo_attention"] = attention
            # Attributes are found there at once; elsewhere nn.Module looks for them last.
            module.__dict__.update(module._modules)
        self._head = self._load_head(exchanged, library, reader) if backend.stage.is_last else None

    @classmethod
    def tensor_shapes(cls, config: ModelConfig) -> dict[str, Shape]:
        """See Model."""
        assert config.library is not None
        return {name: each.shape for name, each in tensors_of(config.library).items()}

    @property
    def is_recordable(self) -> bool:
        # Python and torch compute between the kernels.
        return False

    @property
    def embedding(self) -> Embedding | None:
        return self._embed

    @property
    def head(self) -> OutputHead:
        assert self._head is not None, "only the last stage has a head"
        return self._head

    @property
    def weight_bytes(self) -> int:
        return self._num_bytes

    def rows_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._row_multiple) * self._row_multiple

    def forward(self, token_ids_T: torch.Tensor) -> Stream:
        """See Model. The last stage's result is normed: that is the library's."""
        context, num_tokens = current(), len(token_ids_T)
        x_TE = context.workspace.take("residual", num_tokens, self.config.hidden_size, dtype=torch.float32)
        if not num_tokens:
            return x_TE
        assert context.positions_T is not None
        padding = self.rows_for(num_tokens) - num_tokens
        ids_1T, positions_1T = token_ids_T[None], context.positions_T[None]
        if padding:
            ids_1T, positions_1T = (functional.pad(each, (0, padding)) for each in (ids_1T, positions_1T))
        output = self._base(input_ids=ids_1T, position_ids=positions_1T, use_cache=False)
        result_1TE = output.last_hidden_state if self._departure is None else self._departure.result
        return x_TE.copy_(result_1TE[0, :num_tokens])

    def _cut_stages(self, layers: nn.ModuleList, exchanged: Exchanged) -> Departure | None:
        """Replaces the layers of other stages. Returns the one that keeps this stage's result, for the next."""
        own = self._layers
        for number in range(len(layers)):
            if number not in own:
                layers[number] = Elsewhere(layers[number])
        if own.start > 0:
            layers[own.start - 1] = Arrival(layers[own.start - 1], self._incoming)
        if own.stop == len(layers):
            return None
        layers[own.stop] = departure = Departure(layers[own.stop])
        return departure

    def _incoming(self) -> torch.Tensor:
        context = current()
        rows = self.rows_for(len(context.slots_T))
        return context.workspace.take("residual", rows, self.config.hidden_size, dtype=torch.float32)

    def _load_linears(self, exchanged: Exchanged, here: set[str], library: LibraryConfig, reader: WeightReader) -> None:
        prefix = f"{exchanged.base_name}."
        linears = {name: module for name, module in exchanged.linears.items() if name in here}
        relative = {name.removeprefix(prefix): module for name, module in linears.items()}
        ways = {f"{prefix}{name}": way for name, way in divisions(self._base, relative, self.backend.shard).items()}
        if self.backend.native is not None:
            formulas = Formulas(self.config, self.backend, self._base, linears, ways, reader)
            for name, module in list(self._base.named_modules(prefix=exchanged.base_name)):
                formulas.exchange(name, module)
            linears = formulas.others
            self._num_bytes += formulas.num_bytes
        loadable = (group for group in library.fused if set(group) <= linears.keys())
        # Gathered outputs come rank by rank, so those of several layers would be mixed.
        fused = [group for group in loadable if _have_one_way([ways[name] for name in group])]
        grouped = {name for group in fused for name in group}
        for group in [*fused, *((name,) for name in linears if name not in grouped)]:
            self._load_group(group, [linears[name] for name in group], ways[group[0]], reader)
        for name, weight in exchanged.weights.items():
            if name.rpartition(".")[0] in here:
                packed = PackedLinear(reader(name), None, self.backend)
                weight.octavo.product = product_of(packed, self.backend.compute_dtype)
                self._num_bytes += packed.num_bytes

    def _load_group(
        self, names: Sequence[str], modules: Sequence[OctavoLinear], way: Division, reader: WeightReader
    ) -> None:
        shard = self.backend.shard
        linears = fuse(modules)
        widths = {name: module.out_features for name, module in zip(names, modules, strict=True)}
        outputs: Callable[[str], slice] | None = None
        inputs: slice | None = None
        if way in (Division.OUTPUTS, Division.GATHERED):
            outputs = lambda name: shard.of(widths[name], name)  # noqa: E731
        elif way in (Division.INPUTS, Division.TAKEN):
            inputs = shard.of(modules[0].in_features, names[0])
        has_bias = modules[0].bias is not None
        if way is Division.PAIRED:
            packed = self._paired(names[0], modules[0], reader)
        else:
            packed = load_linear(reader, names, bias=has_bias, backend=self.backend, outputs=outputs, inputs=inputs)
        self._num_bytes += packed.num_bytes
        if way in (Division.OUTPUTS, Division.PAIRED):
            linears.split([width // shard.size for width in widths.values()])
        linears.product = divided(product_of(packed, self.backend.compute_dtype), way, inputs)

    def _paired(self, name: str, module: OctavoLinear, reader: WeightReader) -> PackedLinear:
        half = module.out_features // 2
        own = self.backend.shard.of(half, name)
        parts = [own, slice(half + own.start, half + own.stop)]
        bias_O = None
        if module.bias is not None:
            whole_O = reader(f"{name}.bias")
            bias_O = torch.cat([whole_O[part] for part in parts])
        return PackedLinear([reader.weight(f"{name}.weight", part) for part in parts], bias_O, self.backend)

    def _load_experts(self, exchanged: Exchanged, here: set[str], reader: WeightReader) -> None:
        prefix = f"{exchanged.base_name}."
        experts = {name: module for name, module in exchanged.experts.items() if name in here}
        parameters = {f"{name}.down_proj".removeprefix(prefix): module for name, module in experts.items()}
        ways = divisions(self._base, parameters, self.backend.shard)
        for name, module in experts.items():
            way = ways[f"{name}.down_proj".removeprefix(prefix)]
            loaded = Experts(module, name, reader, self.backend, is_shared=way is Division.INPUTS)
            module.__dict__["octavo_experts"] = loaded
            self._num_bytes += loaded.num_bytes

    def _load_others(self, exchanged: Exchanged, reader: WeightReader) -> None:
        """Loads the small tensors of the library's own modules, and computes those that no file has."""
        linears = {*exchanged.linears, *exchanged.experts, exchanged.embedding_name}
        for name, module in self._base.named_modules(prefix=exchanged.base_name):
            computed = [each for each in module._buffers if each in module._non_persistent_buffers_set]
            # Comes first: it may give a module's parameters new numbers, too.
            _compute_buffers(exchanged.model, name, module, computed)
            for each, parameter in list(module.named_parameters(recurse=False)):
                if name not in linears:
                    full = f"{name}.{each}"
                    whole = reader.float32(full)
                    assert whole.shape == parameter.shape
                    own = part_of(self._base, full.partition(".")[2], parameter, self.backend.shard)
                    loaded = nn.Parameter(whole[own].clone(), requires_grad=False)
                    module._parameters[each] = loaded
                    self._num_bytes += loaded.nbytes
            for each, buffer in list(module._buffers.items()):
                if buffer is not None and each not in computed:
                    module._buffers[each] = reader.float32(f"{name}.{each}").clone()

    def _exchange_norms(self) -> None:
        kernels = self.backend.native
        if kernels is None:
            return
        for module in list(self._base.modules()):
            for name, child in list(module.named_children()):
                norm = exchanged_norm(child, kernels)
                if norm is not None:
                    module._modules[name] = norm

    def _load_head(self, exchanged: Exchanged, library: LibraryConfig, reader: WeightReader) -> OutputHead:
        model, name, shard = exchanged.model, f"{exchanged.head_name}.weight", self.backend.shard
        vocab_size, bias = self.config.vocab_size, exchanged.head.bias
        part = shard.covering(vocab_size, "vocab_size") if shard.size > 1 else None
        bias_V: torch.Tensor | None = None
        if bias is not None:
            bias_V = reader(f"{exchanged.head_name}.bias")
            bias_V = bias_V if part is None else bias_V[part]
        stored = tied_names(model).get(name, name)
        linear = PackedLinear(reader.head_weight(stored, part), bias_V, self.backend)
        self._num_bytes += linear.num_bytes
        around = AroundHead(model, exchanged.base_name, exchanged.head_name)
        return LibraryHead(linear, vocab_size, self.backend, around)


def _checked(config: ModelConfig, backend: Backend) -> LibraryConfig:
    assert config.library is not None
    if backend.gpu is not None:
        raise ValueError("model_impl=transformers is for CPUs only so far: use model_impl=octavo, or device=cpu")
    if backend.experts.size > 1:
        raise ValueError("enable_expert_parallel: model_impl=transformers divides each expert; leave it out")
    check_heads(config.num_heads, config.num_kv_heads, backend.shard)
    return config.library


def _have_one_way(ways: Sequence[Division]) -> bool:
    return len(set(ways)) == 1 and ways[0] is not Division.GATHERED


def _compute_buffers(model: Any, name: str, module: nn.Module, computed: Sequence[str]) -> None:
    """Computes buffers that are functions of the config, by the library's own initialization. Raises WeightsError if it
    leaves one out."""
    if not computed:
        return
    for each in computed:
        buffer = module._buffers[each]
        if buffer is not None:
            blank = float("nan") if buffer.is_floating_point() else 0
            module._buffers[each] = torch.full(buffer.shape, blank, dtype=buffer.dtype)
    with torch.no_grad():
        model._init_weights(module)
    for each in computed:
        buffer = module._buffers[each]
        if buffer is not None and buffer.is_floating_point() and buffer.isnan().any():
            raise WeightsError(f"{name}.{each} is in no checkpoint, and transformers does not say how to compute it")
