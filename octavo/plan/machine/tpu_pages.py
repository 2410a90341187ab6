"""Pages of the KV cache on TPUs. A block of the scheduler is a page there."""

from dataclasses import dataclass

SMALLEST_PAGE, LARGEST_PAGE = 16, 256
# So many pages hold a sequence of the maximum length, as far as the bounds allow.
_PAGES_A_SEQUENCE = 16
# The kernel reads block tables from a TPU core's scalar memory, 1 MiB, and needs half of it for other things.
_TABLE_BYTES = 2**19


def page_size(max_model_len: int) -> int:
    """Tokens in a page: a 16th of the maximum length, rounded up to a power of two, between 16 and 256.

    Small pages waste less in the last page of a sequence; large ones make fewer, longer copies from HBM. The rule is
    vLLM's (PallasAttentionBackend.get_page_size). Raises ValueError.
    """
    if max_model_len < 1:
        raise ValueError(f"max_model_len={max_model_len}: a sequence has 1 token or more")
    power = 1 << (max_model_len - 1).bit_length()
    return min(max(power // _PAGES_A_SEQUENCE, SMALLEST_PAGE), LARGEST_PAGE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """size: tokens in a page. num_pages: of the longest sequence. table_bytes: the block tables of max_num_seqs such
    sequences. most_seqs: sequences whose tables fit into scalar memory."""

    size: int
    num_pages: int
    table_bytes: int
    most_seqs: int

    @property
    def tables_fit(self) -> bool:
        return self.table_bytes <= _TABLE_BYTES


def plan_pages(max_model_len: int, max_num_seqs: int) -> Pages:
    """Raises ValueError."""
    size = page_size(max_model_len)
    num_pages = -(-max_model_len // size)
    return Pages(
        size=size,
        num_pages=num_pages,
        table_bytes=4 * num_pages * max_num_seqs,
        most_seqs=_TABLE_BYTES // (4 * num_pages),
    )
