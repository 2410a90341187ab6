"""The desk of an LLM (router.request): its model, its text and its items, in this process."""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from protos import inference_pb2 as pb
from router.errors import InvalidRequest
from router.request.media.asked import AskedItem
from router.request.media.limits import MediaLimits
from router.request.media.read import File, ReadItem, inline_file, read_item
from router.request.outputs import Outputs
from router.text.tokenizer import Tokenizer
from runtime.media.recipes.recipe import Recipe

_Result = TypeVar("_Result")


def run_here(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Runs a coroutine that never suspends, whether or not an event loop runs in this thread."""
    while True:
        try:
            # A pause for other work of an event loop yields None.
            pause = work.send(None)
        except StopIteration as ended:
            return ended.value
        assert pause is None, f"it waits for {pause}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """The loaded model (router.request.served.Model). max_logprobs: the option."""

    info: pb.ModelInfo
    max_logprobs: int

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def media_json(self) -> str:
        return self.info.media_json


class LocalText:
    """Tokenizes and compiles at once (router.request.served.Text)."""

    # They are the program's own.
    trusts_templates = True

    def __init__(
        self, tokenizer: Tokenizer, outputs: Outputs, compile_constraint: Callable[[pb.Constraint], pb.Constraint]
    ) -> None:
        """compile_constraint: returns the canonical form. Raises RequestError."""
        self.tokenizer, self.outputs = tokenizer, outputs
        self._compile = compile_constraint

    @property
    def encoder(self) -> "LocalText":
        return self

    async def encode(self, text: str, most_tokens: int, *, add_special_tokens: bool = True) -> list[int]:
        return self.tokenizer.encode(text, most_tokens, add_special_tokens=add_special_tokens)

    async def encode_fill_in(
        self, prefix: str, suffix: str, most_tokens: int, *, add_special_tokens: bool = True
    ) -> list[int]:
        return self.tokenizer.encode_fill_in(prefix, suffix, most_tokens, add_special_tokens=add_special_tokens)

    async def encode_chat(
        self, chat: pb.ChatPrompt, most_tokens: int, *, add_special_tokens: bool = False
    ) -> list[int]:
        return self.tokenizer.encode_chat(chat, most_tokens, add_special_tokens=add_special_tokens)

    async def encode_bad_words(self, words: Sequence[str]) -> list[list[list[int]]]:
        return self.tokenizer.encode_bad_words(words)

    async def canonical(self, constraint: pb.Constraint, model: pb.ModelInfo) -> pb.Constraint:
        return self._compile(constraint)


@dataclass(frozen=True, slots=True)
class LocalItems:
    """Reads images and videos that come with their request (router.request.features.items.ItemReader)."""

    limits: MediaLimits

    async def read(self, asked: Sequence[AskedItem], options: pb.ItemOptions, recipe: Recipe) -> list[ReadItem]:
        """Raises InvalidRequest."""
        return [read_item(each, _files(each), options, recipe, self.limits) for each in asked]

    def find(self, name: bytes) -> ReadItem | None:
        return None


def _files(asked: AskedItem) -> list[File]:
    """Raises InvalidRequest."""
    files: list[File] = []
    for i, image in enumerate(asked.images):
        found = inline_file(image, asked.image_field(i))
        if isinstance(found, str):
            raise InvalidRequest(f"{asked.image_field(i)}.url={found[:200]!r}: nothing is fetched here, give the file")
        files.append(found)
    return files
