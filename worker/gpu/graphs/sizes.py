"""Which sizes of steps get CUDA graphs."""

import logging
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

_log = logging.getLogger("octavo.worker")

GraphLevel = Literal["NONE", "PIECEWISE", "FULL"]

# Those of vLLM. Beyond 512 tokens a step computes for longer than Python takes to launch its kernels.
_LARGEST_DEFAULT = 512
_DEFAULTS = (1, 2, 4, *range(8, 256, 8), *range(256, _LARGEST_DEFAULT + 1, 16))


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSizes:
    """Ascending. A step runs as the graph of the next size, with padding."""

    # Rows of a step that only decodes, which runs as one graph.
    decodes: tuple[int, ...] = ()
    # Tokens of any step, which runs as pieces between attentions.
    pieces: tuple[int, ...] = ()

    def for_decodes(self, num_rows: int) -> int | None:
        """The size whose graph computes so many decodes. None: there is none as large."""
        return _next(self.decodes, num_rows)

    def for_pieces(self, num_tokens: int) -> int | None:
        """The size whose pieces compute so many tokens. None: there is none as large."""
        return _next(self.pieces, num_tokens)


def _next(sizes: tuple[int, ...], wanted: int) -> int | None:
    index = bisect_left(sizes, wanted)
    return sizes[index] if index < len(sizes) else None


def graph_sizes(
    level: GraphLevel,
    capture_sizes: Sequence[int],
    *,
    enforce_eager: bool,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> GraphSizes:
    """What compilation_config and enforce_eager ask for, as far as steps can be that large.

    capture_sizes: any order. Empty: 1, 2, 4, multiples of 8 up to 256 and of 16 up to 512, below what a step can have
    at most, and that itself: no step of decodes is left without a graph for a max_num_seqs that is none of them.

    As in vLLM, a size that no step can have is left out, with a warning here; and a size above max_num_seqs is for
    pieces alone, since each row of a full graph has one token.

    Raises ValueError if that leaves no size at all, although graphs were asked for.
    """
    if level == "NONE" or enforce_eager:
        return GraphSizes()
    most_decodes = min(max_num_seqs, max_num_batched_tokens)
    if not capture_sizes:
        return GraphSizes(
            decodes=_defaults(most_decodes) if level == "FULL" else (), pieces=_defaults(max_num_batched_tokens)
        )
    sizes = sorted(set(capture_sizes))
    possible = tuple(size for size in sizes if size <= max_num_batched_tokens)
    if not possible:
        raise ValueError(
            f"compilation_config.cudagraph_capture_sizes={sizes}: no step has more than "
            f"max_num_batched_tokens={max_num_batched_tokens} tokens; give sizes up to that, or none for the usual "
            "ones, or enforce_eager for no graphs"
        )
    if len(possible) < len(sizes):
        _log.warning(
            "compilation_config.cudagraph_capture_sizes: %s left out, for no step has more than "
            "max_num_batched_tokens=%d tokens",
            sizes[len(possible) :],
            max_num_batched_tokens,
        )
    decodes = tuple(size for size in possible if size <= most_decodes) if level == "FULL" else ()
    if level == "FULL" and not decodes:
        _log.warning(
            "compilation_config.cudagraph_capture_sizes=%s: steps that only decode run in pieces, for none of these is "
            "within max_num_seqs=%d",
            sizes,
            max_num_seqs,
        )
    return GraphSizes(decodes=decodes, pieces=possible)


def _defaults(most: int) -> tuple[int, ...]:
    most = min(most, _LARGEST_DEFAULT)
    return (*(size for size in _DEFAULTS if size < most), most)
