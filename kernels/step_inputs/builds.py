"""Ahead-of-time builds of step inputs."""

import torch

from kernels.sampling.triton import SamplingColumns
from kernels.step_inputs.triton import expand, remember_tokens, write_columns, write_tables
from kernels.triton_common.kernel_build import KernelBuild
from kernels.triton_common.recording import float32, int32, recorded, tensor

_TABLES = int32(256, 2048)


def shipped() -> list[KernelBuild]:
    return [
        recorded("expand-blocks-of-16", lambda: _expand(16)),
        recorded("expand-blocks-of-32", lambda: _expand(32)),
        recorded("expand-with-shifts", lambda: _expand(16, int32(8))),
        recorded("write-tables", lambda: write_tables(_TABLES, int32(8), int32(8), int32(8))),
        recorded("write-columns", lambda: write_columns(_columns(256), int32(8), _columns(8))),
        recorded("remember-tokens-after-drafts", lambda: remember_tokens(int32(256), int32(8), int32(8, 4), int32(8))),
    ]


def _expand(block_size: int, shifts_S: torch.Tensor | None = None) -> None:
    expand(
        int32(8),
        int32(9),
        int32(8),
        int32(32),
        int32(256),
        _TABLES,
        block_size=block_size,
        token_ids_T=int32(32),
        positions_T=int32(32),
        slots_T=tensor(torch.int64, 32),
        shifts_S=shifts_S,
    )


def _columns(num_rows: int) -> SamplingColumns:
    return SamplingColumns(
        temperature_R=float32(num_rows),
        top_k_R=int32(num_rows),
        top_p_R=tensor(torch.float64, num_rows),
        min_p_R=float32(num_rows),
        seed_R=tensor(torch.int64, num_rows),
        choice_R=int32(num_rows),
    )
