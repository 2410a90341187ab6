"""The answers of `octavo plan --device`, which need no workload, and the pages of the KV cache on TPUs."""

from dataclasses import dataclass

from rich.console import Console

from octavo.plan.costs.model_shape import ModelShape
from octavo.plan.machine.advice import cpu_advice
from octavo.plan.machine.cpu_nodes import CpuNodes
from octavo.reports import print_json

_KIB, _GIB = 2**10, 2**30


def print_cpu(model: ModelShape, nodes: CpuNodes, *, as_json: bool) -> None:
    """Prints the machine's sockets and nodes, and how to divide the model over them."""
    advice = cpu_advice(model, nodes)
    if as_json:
        print_json(
            {
                "num_sockets": nodes.num_sockets,
                "num_cores": nodes.num_cores,
                "num_nodes": nodes.num_nodes,
                "threads": [len(each) for each in nodes.cores],
                "memory": list(nodes.memory),
                "distances": [list(row) for row in nodes.distances],
                "take": advice.take,
                "reasons": list(advice.reasons),
            }
        )
        return
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{nodes.num_sockets} sockets, {nodes.num_cores} cores, {nodes.num_nodes} NUMA nodes", style="bold")
    for number, cores in enumerate(nodes.cores):
        memory = nodes.memory[number] / _GIB
        distances = " ".join(map(str, nodes.distances[number]))
        console.print(f"node {number}: {len(cores)} hardware threads, {memory:.1f} GiB, distances {distances}")
    console.print(f"take {advice.take}", style="bold")
    for reason in advice.reasons:
        console.print(f"  {reason}")


def print_tpu(model: ModelShape, *, max_model_len: int, max_num_seqs: int, as_json: bool) -> None:
    """Prints the page size for a model's longest sequence, and what follows from it."""
    pages = plan_pages(max_model_len, max_num_seqs)
    page_bytes = pages.size * model.kv_size * model.num_layers * 2
    if as_json:
        print_json(
            {
                "max_model_len": max_model_len,
                "block_size": pages.size,
                "pages_a_sequence": pages.num_pages,
                "page_bytes": page_bytes,
                "table_bytes": pages.table_bytes,
                "most_seqs": pages.most_seqs,
            }
        )
        return
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{model.name}, max_model_len={max_model_len:,}: pages of {pages.size} tokens", style="bold")
    console.print(
        f"{pages.num_pages:,} pages in the longest sequence, of which the last one wastes {pages.size - 1} tokens at "
        f"most; {page_bytes / _KIB:,.0f} KiB a page in bfloat16, over {model.num_layers} layers"
    )
    tables = f"block tables of max_num_seqs={max_num_seqs:,} take {pages.table_bytes / _KIB:,.0f} KiB"
    if pages.tables_fit:
        console.print(f"{tables} of the 512 KiB of scalar memory that they may have")
    else:
        console.print(
            f"{tables}, and scalar memory has 512 KiB for them: use max_num_seqs={pages.most_seqs:,} or a shorter "
            f"max_model_len",
            style="yellow",
        )


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
