"""Items whose embeddings are those of token ids, so that a prompt with them must give the bits of one that spells these
tokens out; and a small model that takes them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from configs.groups.media import ItemLimits
from kernels.backend import Backend, torch_backend
from kernels.cpu_backend import cpu_backend
from kernels.shard import ALL_LAYERS, Stage
from protos import inference_pb2 as pb
from protos import step_pb2
from runtime.media.names import serialized
from runtime.media.recipes.recipe import ItemSize, Layout, Recipe
from runtime.model_files import resolve_model
from tests.support.models.stages import NUM_LAYERS, VOCAB_SIZE
from worker.cpu.executor import CpuExecutor
from worker.cpu.runner import Runner
from worker.encoders.cache import EncoderCache
from worker.encoders.encoder import Encoder, ItemError
from worker.encoders.items import Items
from worker.layers.kv_cache import KVCache
from worker.models.decoder import EMBEDDING, Decoder
from worker.models.loader import open_checkpoint
from worker.models.registry import model_class
from worker.parallel.axes import Axes
from worker.parallel.groups import Group, without_others
from worker.step.items import ItemTokens
from worker.step.rows import Rows
from worker.weights.safetensors_files import SafetensorsFiles
from worker.weights.source import SourceReader

PLACEHOLDER, SEPARATOR = 120, 121


@dataclass(frozen=True)
class SpelledInput:
    token_ids: Sequence[int]

    @property
    def num_embeddings(self) -> int:
        return len(self.token_ids)

    @property
    def num_bytes(self) -> int:
        return 8 * len(self.token_ids)


class SpelledRecipe(Recipe):
    """A pixel of width is a token; more than one pixel of height makes rows with separators between them."""

    name = "spelled"

    def placeholder(self, kind: pb.ItemKind) -> int | None:
        return PLACEHOLDER

    def embedded(self, kind: pb.ItemKind) -> int:
        return PLACEHOLDER

    def layout(self, size: ItemSize) -> Layout:
        row = [PLACEHOLDER] * size.width
        tokens = [*row, *([SEPARATOR, *row] * (size.height - 1))]
        grid = (1, 1, size.width) if size.height == 1 else ()
        return Layout(token_ids=tokens, num_embeddings=size.width * size.height, grid=grid)

    def as_json(self) -> dict[str, Any]:
        return {}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "SpelledRecipe":
        return cls()


class SpelledEncoder(Encoder):
    """A file of an item is the text of its token ids."""

    recipe = SpelledRecipe()
    weight_bytes = 0

    def __init__(self, table_VE: torch.Tensor) -> None:
        self._table_VE, self.hidden_size = table_VE, table_VE.shape[1]
        self.num_prepared = self.num_encoded = 0

    def use_group(self, group: Group) -> None:
        self.group = group

    def prepare(self, data: pb.ItemData) -> Any:
        self.num_prepared += 1
        if data.files[0].startswith(b"damaged"):
            raise ItemError("the image is truncated")
        return SpelledInput([int(word) for word in data.files[0].split()])

    def encode(self, prepared: Any) -> torch.Tensor:
        self.num_encoded += 1
        return self._table_VE[list(prepared.token_ids)].float()

    def workspace_bytes(self, size: ItemSize) -> int:
        return 4 * self.hidden_size * self.recipe.layout(size).num_embeddings

    def largest(self, limits: ItemLimits, most_tokens: int) -> ItemSize | None:
        if not limits.image.count:
            return None
        return ItemSize(kind=pb.ITEM_KIND_IMAGE, width=limits.image.width or 64, height=1)

    def dummy(self, size: ItemSize) -> Any:
        return SpelledInput([1] * self.recipe.layout(size).num_embeddings)


def spelled(token_ids: Sequence[int]) -> bytes:
    """Returns an item's serialized ItemData."""
    files = [" ".join(map(str, token_ids)).encode()]
    return serialized(pb.ItemData(kind=pb.ITEM_KIND_IMAGE, files=files))


def to_encode(number: int, token_ids: Sequence[int], epoch: int = 0) -> step_pb2.ItemToEncode:
    return step_pb2.ItemToEncode(epoch=epoch, number=number, data=spelled(token_ids), num_embeddings=len(token_ids))


def load_decoder(model: Path, backend: Backend, *, has_axes: bool) -> Decoder:
    """Loads one of tests.support.models.stages.make_model's models. has_axes: rope reads the width of each position."""
    checkpoint = open_checkpoint(resolve_model(str(model)), None, dummy=False)
    config = checkpoint.config
    if has_axes:
        config = replace(config, mrope_section=(0, 0, config.head_size // 2))
    config = replace(config, embedded_token_ids=frozenset({PLACEHOLDER}))
    cls = model_class(config.architecture)
    reader = partial(SourceReader, checkpoint.tensors, cls.tensor_shapes(config), torch.float32, "none")
    with torch.inference_mode():
        return cls(config, reader(lambda fraction: None, backend.device), backend)


def item_runner(
    model: Path,
    *,
    has_axes: bool = False,
    native: bool = True,
    stage: Stage = ALL_LAYERS,
    cache_size: int = 64,
    num_blocks: int = 64,
    block_size: int = 8,
    num_swap_blocks: int = 0,
    max_num_batched_tokens: int = 64,
    max_steps_in_flight: int = 1,
    most_input_bytes: int = 1 << 20,
) -> tuple[Runner, SpelledEncoder]:
    """A runner of the model on this thread. native: with the C++ kernels, if they work here."""
    backend = cpu_backend(torch.float32, 16) if native else torch_backend(torch.float32)
    backend = replace(backend, stage=stage)
    decoder = load_decoder(model, backend, has_axes=has_axes)
    config = decoder.config
    rows = Rows(
        max_num_seqs=8,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=128,
        block_size=block_size,
        num_blocks=num_blocks,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=config.eos_token_ids,
        item_tokens=ItemTokens(embedded=config.embedded_token_ids, has_axes=has_axes),
    )
    info = pb.ModelInfo(
        name="spelled",
        max_model_len=128,
        vocab_size=VOCAB_SIZE,
        block_size=block_size,
        num_blocks=num_blocks,
        media_json="{}",
    )
    encoder = SpelledEncoder(SafetensorsFiles(model).read(EMBEDDING))
    items = None
    if stage.is_first:
        cache = EncoderCache(cache_size, encoder.hidden_size, torch.float32, torch.device("cpu"))
        items = Items(encoder, cache, most_input_bytes=most_input_bytes)
    kv_cache = KVCache(config, num_blocks=num_blocks + 1, block_size=block_size, backend=backend)
    runner = Runner(
        CpuExecutor(decoder),
        kv_cache,
        rows,
        info,
        num_swap_blocks=num_swap_blocks,
        items=items,
        without_others=without_others(Axes(pipeline_size=stage.size), stage.index),
        max_steps_in_flight=max_steps_in_flight,
    )
    return runner, encoder


__all__ = ["NUM_LAYERS", "PLACEHOLDER", "SEPARATOR", "SpelledEncoder", "item_runner", "spelled", "to_encode"]
