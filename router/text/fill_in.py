"""Fill in the middle: prompts from which a model writes what stands between two texts.

Only models that were trained for it can; their tokenizers have tokens that mark the parts. Each family has its own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

PREFIX, SUFFIX = object(), object()


@dataclass(frozen=True, slots=True)
class Form:
    """The parts of a prompt, in order: names of tokens, and the two texts. stops: tokens that end the output."""

    parts: tuple[object, ...]
    stops: tuple[str, ...] = ()

    @property
    def tokens(self) -> Iterator[str]:
        return (part for part in self.parts if isinstance(part, str))


def _marked(begin: str, end: str, middle: str, *stops: str) -> Form:
    """The form of most: each part has a token before it."""
    return Form((begin, PREFIX, end, SUFFIX, middle), stops)


_QWEN_STOPS = ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
# The first whose tokens a tokenizer has is its own. From the models' papers and cards.
FORMS = (
    # Qwen2.5-Coder, Qwen3-Coder, CodeGemma
    _marked("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", *_QWEN_STOPS, "<|file_separator|>"),
    # StarCoder, StarCoder2, Granite
    _marked("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>"),
    # SantaCoder
    _marked("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    # Code Llama
    _marked("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>", "\u2581<EOT>"),
    # GLM
    _marked("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    # DeepSeek-Coder: the second token stands where the output belongs.
    Form(("<\uff5cfim\u2581begin\uff5c>", PREFIX, "<\uff5cfim\u2581hole\uff5c>", SUFFIX, "<\uff5cfim\u2581end\uff5c>")),
    # Codestral: the suffix comes first, and the output continues the prefix.
    Form(("[SUFFIX]", SUFFIX, "[PREFIX]", PREFIX)),
)


@dataclass(frozen=True, slots=True)
class FillIn:
    """The form of one tokenizer, in token ids."""

    parts: tuple[object, ...]
    stop_token_ids: tuple[int, ...]

    def prompt(self, prefix: Sequence[int], suffix: Sequence[int]) -> list[int]:
        token_ids: list[int] = []
        for part in self.parts:
            if isinstance(part, int):
                token_ids.append(part)
            else:
                token_ids += prefix if part is PREFIX else suffix
        return token_ids


def fill_in_of(id_of: Callable[[str], int | None]) -> FillIn | None:
    """Returns the form of a tokenizer; None if it has none. id_of: a token's id, None if there is no such token."""
    for form in FORMS:
        ids: Mapping[str, int | None] = {token: id_of(token) for token in (*form.tokens, *form.stops)}
        if all(ids[token] is not None for token in form.tokens):
            stops = (ids[token] for token in form.stops)
            parts = tuple(ids[part] if isinstance(part, str) else part for part in form.parts)
            return FillIn(parts, tuple(token_id for token_id in stops if token_id is not None))
    return None
