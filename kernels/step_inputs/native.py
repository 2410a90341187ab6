"""The C++ structs of a CPU's rows and batch, declared in decode_rows.h."""

import ctypes
from ctypes import c_int64, c_void_p


class DecodeRowsStruct(ctypes.Structure):
    """`DecodeRows` of kernels/step_inputs/decode_rows.h."""

    _fields_ = (
        ("token_ids", c_void_p),
        ("block_ids", c_void_p),
        ("num_blocks", c_void_p),
        ("num_tokens", c_void_p),
        ("num_prompt_tokens", c_void_p),
        ("num_computed_tokens", c_void_p),
        ("sequences", c_void_p),
        ("failed", c_void_p),
        ("num_rows", c_int64),
        ("token_stride", c_int64),
        ("block_stride", c_int64),
        ("block_size", c_int64),
        ("max_model_len", c_int64),
        ("batch_token_ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("logit_indices", c_void_p),
        ("most_rows", c_int64),
        ("most_tokens", c_int64),
        ("table_stride", c_int64),
    )


class DecodesStruct(ctypes.Structure):
    """`Decodes` of kernels/step_inputs/decode_rows.h."""

    _fields_ = (
        ("rows", c_void_p),
        ("count", c_int64),
        ("num_drafts", c_void_p),
        ("drafts", c_void_p),
    )


class SampledTokensStruct(ctypes.Structure):
    """`SampledTokens` of kernels/step_inputs/decode_rows.h."""

    _fields_ = (
        ("sequences", c_void_p),
        ("positions", c_void_p),
        ("counts", c_void_p),
        ("token_ids", c_void_p),
    )
