"""Steps whose rows all decode, which most are: what they take from the rows and give back to them, by two calls of C++
(kernels/native/decode_rows.h). All other steps, and all without C++, go through numpy: worker.rows, worker.batching and
worker.verification, which say the same."""

import ctypes

import numpy as np

from kernels.native import NativeKernels
from kernels.native.library import DecodeRowsStruct
from protos import step_pb2
from worker.input_batch import InputBatch
from worker.rows import Rows
from worker.scheduled import BatchRows
from worker.scores import Greedy


class Decodes:
    """The steps of these rows in this batch."""

    def __init__(self, kernels: NativeKernels, rows: Rows, batch: InputBatch) -> None:
        # The rows' arrays are used as long as this is.
        self._kernels, self._rows, self._batch = kernels, rows, batch
        most_rows = min(batch.max_rows, batch.max_tokens)
        self._sequences = np.zeros(most_rows, "<i8")
        self._positions = np.zeros(most_rows, "<i4")
        self._token_ids = np.zeros(most_rows, "<i4")
        self._said = [each.ctypes.data for each in (self._sequences, self._positions, self._token_ids)]
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
            table_stride=batch.max_blocks,
        )
        self._address = ctypes.addressof(self._struct)
        # Of the step before, whose rows are mostly those of the next.
        self._decode_rows, self._batch_rows = b"", _batch_rows(b"")

    def begin(self, plan: step_pb2.StepPlan) -> BatchRows | None:
        """Fills the batch with a plan that decodes, and counts its tokens as computed.

        None, and nothing is done, if it has other rows, too, or is not in order: the rows themselves then say what is
        wrong.
        """
        decode_rows = plan.decode_rows
        if plan.rows or plan.num_tokens or plan.num_drafts or plan.draft_token_ids or len(decode_rows) % 2:
            return None
        num_rows, batch = len(decode_rows) // 2, self._batch
        num_blocks = self._kernels.begin_decodes(self._address, decode_rows, num_rows)
        if not num_blocks:
            return None
        batch.num_tokens = batch.num_rows = batch.num_logits = num_rows
        batch.num_blocks = num_blocks
        if decode_rows != self._decode_rows:
            self._decode_rows, self._batch_rows = decode_rows, _batch_rows(decode_rows)
        return self._batch_rows

    def end(self, scores: Greedy, result: step_pb2.StepResult) -> bool:
        """Appends the likeliest tokens to the rows of the step that began last, and puts them into its result.

        False, and nothing is done, if there are failed rows among these: those of no finite logits, now or before.
        """
        num_rows = self._batch.num_rows
        if not self._kernels.end_decodes(
            self._address, self._decode_rows, num_rows, scores.token_ids_L.data_ptr(), scores.largest_L.data_ptr(),
            *self._said,
        ):  # fmt: skip
            return False
        result.sequences = self._sequences[:num_rows].tobytes()
        result.positions = self._positions[:num_rows].tobytes()
        result.token_ids = self._token_ids[:num_rows].tobytes()
        return True


def _batch_rows(decode_rows: bytes) -> BatchRows:
    rows = np.frombuffer(decode_rows, "<u2").astype(np.int64)
    return BatchRows(rows_S=rows, rows_N=rows, all_decode=True)


def _address(array: np.ndarray, dtype: type[np.generic]) -> int:
    assert array.dtype == dtype
    assert array.flags.c_contiguous
    return array.ctypes.data
