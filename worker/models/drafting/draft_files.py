"""Finds the draft model that the options ask for. Checks, before weights are read, that it can draft for the model."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from configs.groups.speculation import SAME_MODEL
from configs.options import Options
from kernels.backend import Backend
from runtime.model_files import ModelFiles, ModelNotFoundError, resolve_model
from runtime.tokenizer.files import tokenizer_directory, tokenizer_exists
from worker.errors import PermanentError
from worker.model_config import ModelConfig
from worker.models.info import model_dtype
from worker.models.loader import config_of
from worker.weights.quantization.kinds import Quantization, resolve_quantization

_log = logging.getLogger("octavo.worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSource:
    """A draft model, checked. max_drafts: of a row in one step."""

    files: ModelFiles
    config: ModelConfig
    dtype: torch.dtype
    quantization: Quantization
    max_drafts: int

    @property
    def name(self) -> str:
        """The method and the model, for Ready."""
        how = str(self.dtype).removeprefix("torch.") if self.quantization == "none" else self.quantization
        return f"draft_model {self.files.name} ({how})"


def find_draft_model(
    options: Options, files: ModelFiles, make_backend: Callable[[ModelConfig, torch.dtype], Backend]
) -> DraftSource | None:
    """Returns the draft model of speculative_config; None: it has none. files: the served model's. make_backend: of a
    model with this config and dtype. Raises PermanentError, naming both models, if the model can't draft."""
    asked = options.speculative_config
    if asked is None or asked.method not in ("auto", "draft_model") or not asked.model:
        return None
    is_same = asked.model == SAME_MODEL
    try:
        draft_files = files if is_same else resolve_model(asked.model)
        config, made_for = config_of(draft_files, options.model_impl if is_same else "auto")
    except ModelNotFoundError as error:
        raise PermanentError(f"speculative_config: {error}") from None
    except ValueError as error:
        raise PermanentError(f"speculative_config: model={asked.model!r}: {error}") from None
    if config.recurrence is not None:
        raise PermanentError(
            f"speculative_config: model={asked.model!r} has layers that carry a state from token to token, which "
            "cannot go back over a rejected draft: use a draft model without them"
        )
    own_config, own_made_for = (config, made_for) if is_same else config_of(files, options.model_impl)
    dtypes = {"auto": model_dtype(options), "float32": torch.float32, "bfloat16": torch.bfloat16}
    dtype = dtypes[asked.dtype]
    try:
        quantization = resolve_quantization(asked.quantization, made_for, make_backend(config, dtype))
    except ValueError as error:
        raise PermanentError(f"speculative_config: {error}") from None
    source = DraftSource(
        files=draft_files,
        config=config,
        dtype=dtype,
        quantization=quantization,
        max_drafts=asked.num_speculative_tokens,
    )
    own = resolve_quantization(options.quantization, own_made_for, make_backend(own_config, model_dtype(options)))
    if is_same and (quantization, dtype) == (own, model_dtype(options)):
        raise PermanentError(
            f"speculative_config: model={SAME_MODEL} with quantization={asked.quantization} drafts with the served "
            f"model as it is (quantization={own}), which takes as long as it saves: use quantization=int4 or int8 on "
            f"a CPU, fp8 on a GPU, or another model"
        )
    if not is_same:
        _check_vocabularies(options, files, own_config, source)
    return source


def _check_vocabularies(options: Options, files: ModelFiles, config: ModelConfig, draft: DraftSource) -> None:
    """Raises PermanentError unless the tokens that both models have are the same."""
    sizes = (config.vocab_size, draft.config.vocab_size)
    both = f"{files.name} ({sizes[0]} tokens) and its draft model {draft.files.name} ({sizes[1]})"
    if not (tokenizer_exists(files, options.tokenizer) and tokenizer_exists(draft.files)):
        if sizes[0] != sizes[1]:
            raise PermanentError(
                f"speculative_config: the vocabularies of {both} differ in size, and one of them has no tokenizer that "
                f"says if its tokens are those of the other: use a draft model with the same vocabulary"
            )
        _log.warning("the vocabularies of %s have the same size; nothing else is known of them", both)
        return
    own = _tokens(tokenizer_directory(files, options.tokenizer))
    others = _tokens(tokenizer_directory(draft.files))
    shared = [token_id for token_id in own.keys() & others.keys() if token_id < min(sizes)]
    wrong = sorted(token_id for token_id in shared if own[token_id] != others[token_id])
    if wrong:
        first = wrong[0]
        raise PermanentError(
            f"speculative_config: the vocabularies of {both} differ: token {first} is {own[first]!r} in the one and "
            f"{others[first]!r} in the other, as are {len(wrong) - 1} more of {len(shared)}: use a draft model with "
            f"the same vocabulary"
        )
    if sizes[0] != sizes[1]:
        _log.info("the vocabularies of %s agree as far as both go; tokens beyond are not drafted", both)


def _tokens(directory: Path) -> dict[int, str]:
    # Imported here: most workers read no tokenizer.
    import tokenizers

    vocabulary = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab(with_added_tokens=True)
    return {token_id: token for token, token_id in vocabulary.items()}
