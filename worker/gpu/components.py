"""Makes the parts of a GPU worker beside its weights (engine, KV cache, graphs), and measures their memory."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from configs.options import Options
from configs.sampling import MAX_LOGPROB_TOKENS, MAX_LOGPROBS, PARAMETERS
from protos import inference_pb2
from worker.device.device import Device, DeviceMemory
from worker.encoders.cache import EncoderCache
from worker.encoders.items import Items
from worker.encoders.sizes import item_sizes
from worker.errors import PermanentError
from worker.gpu.engine import GpuEngine
from worker.gpu.executor import GpuExecutor
from worker.gpu.graphs import CapturedGraphs, graph_memory_estimate, graph_sizes
from worker.gpu.memory import (
    MemoryUse,
    cache_needs_more,
    graphs_need_more,
    items_need_more,
    measure_use,
    out_of_memory,
    serving_needs_more,
    step_needs_more,
)
from worker.gpu.ranks import GpuRanks
from worker.gpu.swap import GpuSwapSpace
from worker.layers.kv_cache import KVCache
from worker.models.info import longest_sequence, resolve_num_swap_blocks
from worker.models.loader import LoadedModel
from worker.parallel.groups import Groups
from worker.sampling.feature import NewRow
from worker.sampling.features import RowSampling, resolve_sampling
from worker.step.inputs import PromptScores, StepInputs, TableChanges


def worst_step(
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    block_size: int,
    vocab_size: int,
    max_logprobs: int = MAX_LOGPROBS,
) -> StepInputs:
    """Returns the step that takes the most memory: all tokens in all rows, each of which samples with every option of a
    request. It overwrites KV block 1 alone; its results are meaningless."""
    num_rows = min(max_num_seqs, max_num_batched_tokens)
    num_tokens = min(max_num_batched_tokens, num_rows * max_model_len)
    lengths = np.full(num_rows, num_tokens // num_rows, np.int32)
    lengths[: num_tokens % num_rows] += 1
    query_starts = np.concatenate(([0], lengths.cumsum())).astype(np.int32)
    rows = np.arange(num_rows, dtype=np.int32)
    blocks = -(-lengths // block_size)
    first_of_row = np.repeat(blocks.cumsum() - blocks, blocks)
    places = np.arange(blocks.sum()) - first_of_row
    last = np.zeros(num_tokens, bool)
    last[query_starts[1:] - 1] = True
    scored = np.flatnonzero(~last).astype(np.int32)
    scores = PromptScores(tokens_P=scored, targets_P=np.zeros_like(scored), num_top=min(max_logprobs, vocab_size))
    return StepInputs(
        rows_S=rows,
        query_starts=query_starts,
        context_lens_S=lengths,
        token_ids_T=np.zeros(num_tokens, np.int32),
        sampling_N=rows,
        output_positions_N=np.zeros(num_rows, np.int32),
        prompt_scores=scores if len(scored) else None,
        new_rows=[_every_kind_of_sampling(row, vocab_size, max_logprobs) for row in range(num_rows)],
        table_changes=TableChanges(
            rows_C=np.repeat(rows, blocks),
            places_C=places.astype(np.int32),
            block_ids_C=np.ones(len(places), np.int32),
        ),
    )


def _every_kind_of_sampling(row: int, vocab_size: int, max_logprobs: int) -> RowSampling:
    numbers: dict[str, Any] = {parameter.name: parameter.example for parameter in PARAMETERS}
    # Listed tokens, unless more can be asked for without a list.
    num_listed = min(MAX_LOGPROB_TOKENS, vocab_size) if max_logprobs < MAX_LOGPROB_TOKENS else 0
    sampling = inference_pb2.SamplingParams(
        **numbers,
        seed=row,
        logprobs=num_listed or min(max_logprobs, vocab_size),
        logprob_token_ids=range(num_listed),
        logit_bias={0: 1.0},
        min_tokens=1,
        stop_token_ids=[0],
        allowed_token_ids=[0],
        bad_word_token_ids=[inference_pb2.TokenIds(ids=[0, 0])],
    )
    nothing = np.zeros(0, np.int32)
    new = NewRow(sampling=sampling, prompt=nothing, output=nothing, vocab_size=vocab_size, eos_token_ids=frozenset())
    return resolve_sampling(row, 0, new)


# A step of 1/8 of the tokens and rows runs before the worst-case step. It compiles kernels, and its memory tells what
# the whole would need if that does not fit.
_PART = 8
# For NCCL. According to its sources a connection takes 4 MiB for large messages, 4.7 and 0.5 for small ones; rings and
# trees have up to three for each of up to 32 channels.
_NCCL_BYTES = 2**30


class Components:
    """Makes the parts for a loaded model. Each method raises PermanentError if memory is short; the message says which
    option to lower, and to what value."""

    def __init__(self, options: Options, device: Device, loaded: LoadedModel, executor: GpuExecutor) -> None:
        """Raises PermanentError or ValueError for options that the model does not allow."""
        self._options, self._device, self._loaded, self._executor = options, device, loaded, executor
        self._longest = longest_sequence(options, loaded.config)
        compilation, speculation = options.compilation_config, options.speculative_config
        self._most_drafts = 0 if speculation is None else speculation.num_speculative_tokens
        self._sizes = graph_sizes(
            compilation.level,
            compilation.cudagraph_capture_sizes,
            enforce_eager=options.enforce_eager,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            most_drafts=self._most_drafts,
        )
        self._weights = device.memory().allocated
        encoder, dtype = loaded.encoder, executor.backend.compute_dtype
        sizes = self._sizes_of_items = None if encoder is None else item_sizes(options, encoder, dtype, self._longest)
        self._encoder_cache: EncoderCache | None = None
        if encoder is not None and sizes is not None:
            sizes.warn_of_refusals()
            with out_of_memory(lambda: items_need_more(options, device.memory(), sizes)):
                self._encoder_cache = EncoderCache(sizes.cache_size, encoder.hidden_size, dtype, device.torch_device)
        backend = executor.backend
        self.block_bytes = KVCache.block_bytes(loaded.config, options.block_size, backend.kv_cache_dtype, backend.shard)

    def items(self, use: MemoryUse) -> Items | None:
        """Makes what this rank encodes items with; None: it encodes none. use: as measured at the start."""
        encoder, sizes, cache = self._loaded.encoder, self._sizes_of_items, self._encoder_cache
        if encoder is None or sizes is None or cache is None:
            return None

        def guard() -> AbstractContextManager[None]:
            return out_of_memory(lambda: serving_needs_more(self._options, self._device.memory(), use))

        return Items(encoder, cache, most_input_bytes=sizes.input_bytes, guard=guard)

    def measure(self) -> MemoryUse:
        """Measures the memory taken by all but the KV cache, with a worst-case step and some graphs. Skips these two if
        num_blocks_override is set."""
        options, device = self._options, self._device
        if options.num_blocks_override:
            return measure_use(device, lambda: None, weights=self._weights)
        # An estimate: the ranks connect only after each of them is built.
        nccl = _NCCL_BYTES if options.world_size > 1 and device.torch_device.type == "cuda" else 0
        kv_cache = self.kv_cache(2, measure_use(device, lambda: None, weights=self._weights))
        # If not even the part fits, it needs more than all free memory.
        needed_by_part = self._room().free
        engines: list[GpuEngine] = []

        def part_of_it() -> None:
            self._compute_worst(kv_cache, _PART)

        def all_of_it() -> None:
            engines.append(self._compute_worst(kv_cache, 1))

        with out_of_memory(lambda: step_needs_more(options, self._room(), part=_PART, needed_by_part=needed_by_part)):
            needed_by_part = device.peak_bytes(part_of_it)
            use = measure_use(device, all_of_it, weights=self._weights, kv_bytes=2 * self.block_bytes)
        with out_of_memory(self._graphs_error):
            graphs = graph_memory_estimate(engines[0], self._executor, kv_cache, device, self._sizes)
        # The encoder's work is done before the step's, so the larger one counts.
        of_items = self._peak_of_items(2 * self.block_bytes)
        return replace(use, step=max(use.step, of_items), graphs=graphs, nccl=nccl)

    def _peak_of_items(self, kv_bytes: int) -> int:
        """Encodes the largest item beside what is allocated, kv_bytes of it for KV. Returns the bytes beyond those and
        the weights."""
        sizes, encoder, device = self._sizes_of_items, self._loaded.encoder, self._device
        if sizes is None or encoder is None:
            return 0

        def encode() -> None:
            with torch.inference_mode():
                encoder.encode(encoder.dummy(sizes.largest))

        with out_of_memory(lambda: items_need_more(self._options, device.memory(), sizes)):
            # The first time compiles kernels.
            encode()
            before = device.memory().allocated
            return before - self._weights - kv_bytes + device.peak_bytes(encode)

    def _compute_worst(self, kv_cache: KVCache, part: int) -> GpuEngine:
        """Computes a worst-case step of a `part`-th of the tokens and rows. Returns the engine."""
        engine = self.engine(kv_cache, self._longest, part=part)
        inputs = worst_step(
            max_num_seqs=max(1, self._options.max_num_seqs // part),
            max_num_batched_tokens=max(1, self._options.max_num_batched_tokens // part),
            max_model_len=self._longest,
            block_size=kv_cache.block_size,
            vocab_size=self._loaded.config.vocab_size,
            max_logprobs=self._options.max_logprobs,
        )
        engine.begin(inputs).wait()
        engine.reset()
        return engine

    def engine(self, kv_cache: KVCache, max_model_len: int, *, part: int = 1) -> GpuEngine:
        """Makes an engine. part: for steps of a `part`-th of the tokens and rows."""
        options = self._options
        return GpuEngine(
            self._executor,
            kv_cache,
            self._device,
            max_num_seqs=max(1, options.max_num_seqs // part),
            max_num_batched_tokens=max(1, options.max_num_batched_tokens // part),
            max_model_len=max_model_len,
            vocab_size=self._loaded.config.vocab_size,
            max_steps_in_flight=options.max_steps_in_flight,
            most_drafts=self._most_drafts,
            has_axes=self._loaded.config.mrope_section is not None,
        )

    def kv_cache(self, num_blocks: int, use: MemoryUse) -> KVCache:
        """Allocates the KV cache. num_blocks: including the null block. use: the memory of everything else."""
        config, backend, block_size = self._loaded.config, self._executor.backend, self._options.block_size
        free_before = self._device.memory().free

        def error() -> PermanentError:
            now = self._device.memory()
            blocks = {"num_blocks": num_blocks, "block_bytes": self.block_bytes}
            return cache_needs_more(self._options, now, use, **blocks, free_before=free_before)

        with out_of_memory(error):
            return KVCache(config, num_blocks=num_blocks, block_size=block_size, backend=backend)

    def capture(
        self, engine: GpuEngine, kv_cache: KVCache, settle: Callable[[], None] = lambda: None
    ) -> CapturedGraphs | None:
        """Captures the engine's graphs; None if the options ask for none. settle: see CapturedGraphs."""
        if not (self._sizes.decodes or self._sizes.pieces):
            return None
        graphs = CapturedGraphs(engine, self._executor, kv_cache, self._device, self._sizes, settle)
        with out_of_memory(self._graphs_error):
            graphs.capture()
        return graphs

    def ranks(self, engine: GpuEngine, kv_cache: KVCache, without_others: Groups) -> GpuRanks:
        """For an engine that computes with other ranks: its graphs are captured once the ranks are connected."""
        capture = partial(self.capture, engine, kv_cache)
        return GpuRanks(self._device, self._executor, engine, capture, without_others)

    def swap_space(self, kv_cache: KVCache) -> GpuSwapSpace:
        """Allocates swap space in pinned host memory; it has 0 blocks if the options ask for none."""
        options = self._options
        dtype = self._executor.backend.kv_cache_dtype
        num_blocks = resolve_num_swap_blocks(options, self._loaded.config, dtype, self._executor.backend.shard)
        try:
            return GpuSwapSpace(kv_cache, self._device, num_blocks)
        except RuntimeError as error:
            raise PermanentError(
                f"swap_space={options.swap_space:g} GiB of pinned host memory can't be allocated ({error}): use less, "
                f"or preemption_mode=recompute"
            ) from error

    def _room(self) -> DeviceMemory:
        """Memory as if only the weights were allocated."""
        memory = self._device.memory()
        return replace(memory, free=memory.free + memory.allocated - self._weights)

    def _graphs_error(self) -> PermanentError:
        sizes = sorted({*self._sizes.decodes, *self._sizes.drafts, *self._sizes.pieces})
        return graphs_need_more(self._options, self._device.memory(), sizes)
