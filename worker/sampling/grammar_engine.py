"""Finds the grammar engine of a worker: there is one if its library is installed and the model has a tokenizer."""

import logging
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from configs.options import Options
from kernels.native.cores import num_usable_cores
from runtime.model_files import ModelFiles
from runtime.tokenizer.files import tokenizer_directory, tokenizer_exists
from worker.model_config import ModelConfig
from worker.sampling.grammars import Grammars

if TYPE_CHECKING:
    from runtime.grammar.llguidance_engine import LlguidanceEngine

_log = logging.getLogger("octavo.worker")

_LIBRARY = "llguidance"


def find_grammars(
    options: Options, files: ModelFiles, config: ModelConfig, cores: Sequence[int] = ()
) -> Grammars | None:
    """Returns what makes the matchers of a model, or None, which costs no import. cores: those of this worker; empty:
    any."""
    try:
        name = f"{_LIBRARY} {version(_LIBRARY)}"
    except PackageNotFoundError:
        return None
    if not tokenizer_exists(files, options.tokenizer):
        return None

    def make_engine() -> "LlguidanceEngine":
        # Half a second, which the first request with a constraint waits for, beside the computation of its prompt.
        from runtime.grammar.llguidance_engine import LlguidanceEngine
        from runtime.grammar.vocabulary import Vocabulary

        directory = tokenizer_directory(files, options.tokenizer)
        engine = LlguidanceEngine(Vocabulary(directory, config.vocab_size, sorted(config.eos_token_ids)))
        assert engine.version == name, f"{engine.version} is not {name}, which this worker has announced"
        _log.info("constraints are computed by %s", engine.version)
        return engine

    return Grammars(make_engine, version=name, num_threads=len(cores) or num_usable_cores(), cores=cores)
