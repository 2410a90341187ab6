"""Loads a draft model on a CPU."""

from configs.options import Options
from worker.cpu.executor import CpuExecutor
from worker.models.drafting.draft_files import DraftSource
from worker.models.drafting.loading import LoadedDraft, load_draft
from worker.weights.cache import open_weight_cache


def load_draft_model(options: Options, source: DraftSource) -> LoadedDraft:
    """Loads the weights. Raises WeightsError."""
    cache = open_weight_cache(options.weight_cache)
    return load_draft(options, source, lambda loaded: CpuExecutor(loaded.model), cache=cache)
