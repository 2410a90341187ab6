"""Prepares and finishes steps whose rows all decode, with or without drafts, in C++."""

import ctypes

import numpy as np

from kernels.native.library import NativeKernels
from kernels.step_inputs.native import DecodeRowsStruct, DecodesStruct, SampledTokensStruct
from protos import step_pb2
from worker.sampling.sampler import Greedy
from worker.step.batch import InputBatch
from worker.step.inputs import BatchRows
from worker.step.rows import Rows


class Decodes:
    """The C++ side of decoding steps: native kernels read and write the arrays of rows and batch."""

    def __init__(self, kernels: NativeKernels, rows: Rows, batch: InputBatch) -> None:
        # Keeps the rows' arrays alive: the struct below holds their addresses.
        self._kernels, self._rows, self._batch = kernels, rows, batch
        most_rows = min(batch.max_rows, batch.max_tokens)
        self._sequences = np.zeros(most_rows, "<i8")
        self._positions = np.zeros(most_rows, "<i4")
        self._counts = np.zeros(most_rows, "<i4")
        self._token_ids = np.zeros(batch.max_tokens, "<i4")
        self._said = SampledTokensStruct(
            sequences=_address(self._sequences, np.int64),
            positions=_address(self._positions, np.int32),
            counts=_address(self._counts, np.int32),
            token_ids=_address(self._token_ids, np.int32),
        )
        self._struct = DecodeRowsStruct(
            token_ids=_address(rows.token_ids_RL, np.int32),
            block_ids=_address(rows.block_ids_RB, np.int32),
            num_blocks=_address(rows.num_blocks_R, np.int64),
            num_tokens=_address(rows.num_tokens_R, np.int64),
            num_prompt_tokens=_address(rows.num_prompt_tokens_R, np.int64),
            num_computed_tokens=_address(rows.num_computed_tokens_R, np.int64),
            sequences=_address(rows.sequence_R, np.int64),
            failed=_address(rows.failed_R, np.bool_),
            num_rows=rows.max_num_seqs,
            token_stride=rows.token_ids_RL.shape[1],
            block_stride=rows.block_ids_RB.shape[1],
            block_size=rows.block_size,
            max_model_len=rows.max_model_len,
            batch_token_ids=_address(batch.token_ids, np.int64),
            positions=_address(batch.positions, np.int64),
            slots=_address(batch.slots, np.int64),
            query_starts=_address(batch.starts, np.int32),
            context_lens=_address(batch.context_lens, np.int32),
            block_tables=_address(batch.block_tables, np.int32),
            logit_indices=_address(batch.logit_places, np.int64),
            most_rows=most_rows,
            most_tokens=batch.max_tokens,
            table_stride=batch.max_blocks,
        )
        self._step = DecodesStruct()
        self._all, self._named = ctypes.addressof(self._struct), ctypes.addressof(self._step)
        self._said_address = ctypes.addressof(self._said)
        # Cached from the previous step: the next one mostly has the same rows. The arrays are those of `_step`.
        self._decode_rows = b""
        self._rows_u2 = np.empty(0, "<u2")
        self._batch_rows = BatchRows(rows_S=np.empty(0, np.int64), rows_N=np.empty(0, np.int64), all_decode=True)
        self._drafts = np.empty(0, np.int64)

    def begin(self, plan: step_pb2.StepPlan) -> BatchRows | None:
        """Fills the batch from a plan whose rows all decode, and counts its tokens, with drafts, as computed.

        Returns None, and changes nothing, if the plan also has other rows or is invalid: `Rows.schedule` then reports
        what is wrong.
        """
        if plan.rows or plan.num_tokens or len(plan.decode_rows) % 2:
            return None
        if plan.rows_with_drafts or plan.num_drafts or plan.draft_token_ids:
            num_drafts_S = self._name_with_drafts(plan)
            if num_drafts_S is None:
                return None
        else:
            num_drafts_S = None
            if plan.decode_rows != self._decode_rows or self._batch_rows.num_drafts_N is not None:
                self._name(np.frombuffer(plan.decode_rows, "<u2"), None)
                self._decode_rows = plan.decode_rows
        batch, num_rows = self._batch, len(self._rows_u2)
        num_blocks = self._kernels.begin_decodes(self._all, self._named)
        if not num_blocks:
            return None
        num_tokens = num_rows if num_drafts_S is None else num_rows + len(self._drafts)
        batch.num_rows, batch.num_blocks = num_rows, num_blocks
        batch.num_tokens = batch.num_logits = num_tokens
        return self._batch_rows

    def _name(self, rows_u2: np.ndarray, num_drafts_S: np.ndarray | None) -> None:
        """Makes these the rows of the step."""
        rows = rows_u2.astype(np.int64)
        self._rows_u2 = rows_u2
        self._batch_rows = BatchRows(rows_S=rows, rows_N=rows, num_drafts_N=num_drafts_S, all_decode=True)
        self._step.rows, self._step.count = rows_u2.ctypes.data, len(rows_u2)
        self._step.num_drafts = None if num_drafts_S is None else num_drafts_S.ctypes.data
        self._step.drafts = None if num_drafts_S is None else self._drafts.ctypes.data

    def _name_with_drafts(self, plan: step_pb2.StepPlan) -> np.ndarray | None:
        """Returns the drafts of each row; None if they are invalid."""
        num_rows, num_drafts = len(plan.rows_with_drafts) // 2, len(plan.draft_token_ids) // 4
        are_whole = len(plan.rows_with_drafts) == 2 * num_rows and len(plan.draft_token_ids) == 4 * num_drafts
        if not are_whole or len(plan.num_drafts) != 4 * num_rows or not num_rows or not num_drafts:
            return None
        counts, drafts = np.frombuffer(plan.num_drafts, "<i4"), np.frombuffer(plan.draft_token_ids, "<i4")
        if counts.min() < 1 or counts.sum() != num_drafts or drafts.min() < 0 or drafts.max() >= self._rows.vocab_size:
            return None
        self._drafts = drafts.astype(np.int64)
        num_drafts_S = np.zeros(len(plan.decode_rows) // 2 + num_rows, np.int64)
        num_drafts_S[-num_rows:] = counts
        self._name(np.frombuffer(plan.decode_rows + plan.rows_with_drafts, "<u2"), num_drafts_S)
        return num_drafts_S

    def end(self, scores: Greedy, result: step_pb2.StepResult) -> bool:
        """Appends the likeliest tokens to the rows of the latest step, up to and including the first that differs from
        its draft, and puts them into its result.

        Returns False, and changes nothing, if a row has failed: its logits were not finite, in this step or before.
        """
        num_said = self._kernels.end_decodes(
            self._all, self._named, scores.token_ids_L.data_ptr(), scores.largest_L.data_ptr(), self._said_address
        )
        if not num_said:
            return False
        num_rows = self._batch.num_rows
        result.sequences = self._sequences[:num_rows].tobytes()
        result.positions = self._positions[:num_rows].tobytes()
        result.token_ids = self._token_ids[:num_said].tobytes()
        if self._batch_rows.num_drafts_N is not None:
            result.num_tokens = self._counts[:num_rows].tobytes()
        return True

    @property
    def tokens_ND1(self) -> np.ndarray:
        """The tokens that each row sampled in the latest step, int64, with zeros behind them."""
        counts_N = self.counts_N
        tokens_ND1 = np.zeros((len(counts_N), int(counts_N.max())), np.int64)
        tokens_ND1[np.arange(tokens_ND1.shape[1]) < counts_N[:, None]] = self._token_ids[: counts_N.sum()]
        return tokens_ND1

    @property
    def counts_N(self) -> np.ndarray:
        """The number of these tokens, int64."""
        return self._counts[: self._batch.num_rows].astype(np.int64)


def _address(array: np.ndarray, dtype: type[np.generic]) -> int:
    assert array.dtype == dtype
    assert array.flags.c_contiguous
    return array.ctypes.data
