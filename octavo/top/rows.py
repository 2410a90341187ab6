"""The rows of both tables, and the line above them, from one look at a cluster."""

from collections.abc import Sequence

from rich.text import Text

from protos import admin_pb2 as pb
from runtime.telemetry.rates import ClusterRates, Quantiles, ReplicaRates

# Names are short: all fit into 80 columns.
REPLICA_COLUMNS = ("rep", "state", "run", "wait", "kv", "out/s", "in/s", "step", "hits", "acc", "pre", "lag")
REQUEST_COLUMNS = ("request", "replica", "prompt", "output", "age", "first", "moved")
# The columns after the states are numbers.
NUM_TEXTS = 2

_STYLES = {"ready": "green", "away": "red", "quarantined": "red", "left_out": "red"}


def plain(text: str) -> str:
    """Replaces what would move the cursor or reorder text: ids are what clients chose."""
    return "".join(char if char.isprintable() else "?" for char in text)


def replica_row(view: pb.ReplicaView, rates: ReplicaRates) -> list[Text]:
    name = view.replica_id or plain(view.address)[-12:]
    used = view.num_blocks - view.num_available_blocks
    blocks = f"{100 * used / view.num_blocks:.0f}%" if view.num_blocks else "-"
    numbers = (
        f"{view.num_running}",
        f"{view.num_waiting}",
        blocks,
        _count(rates.output_tokens),
        _count(rates.prompt_tokens),
        _seconds(rates.step_seconds and rates.step_seconds.p50),
        _share(rates.hit_rate),
        _share(rates.acceptance),
        _count(view.totals.num_preemptions),
        _seconds(rates.lag and rates.lag.p99),
    )
    state = Text(view.state, _STYLES.get(view.state, "yellow"))
    return [Text(name), state, *(Text(number, justify="right") for number in numbers)]


def request_row(view: pb.RequestView) -> list[Text]:
    numbers = (
        _count(view.num_prompt_tokens),
        f"{_count(view.num_output_tokens)}/{_count(view.max_tokens)}",
        _seconds(view.age),
        _seconds(view.time_to_first_token if view.time_to_first_token >= 0 else None),
        f"{view.num_resubmissions}",
    )
    at = Text("parked", "red") if view.is_parked else Text(plain(view.replica_id) or "-")
    return [Text(plain(view.request_id)), at, *(Text(number, justify="right") for number in numbers)]


def summary(view: pb.ObserveResponse, rates: ClusterRates, target: str) -> Text:
    """Two lines: the router, and what its clients see."""
    router = view.router
    first = f"{plain(router.model)} at {target}, up {_age(router.uptime)}: {router.num_streams} streams"
    if router.num_parked_streams:
        first += f", {router.num_parked_streams} wait for a replica"
    if router.num_resubmissions:
        first += f", {router.num_resubmissions} moves"
    second = (
        f"{_count(rates.output_tokens)} tok/s, prompts {_count(rates.prompt_tokens)}; p50/p95/p99 "
        f"first {_quantiles(rates.time_to_first_token)}, next {_quantiles(rates.inter_token_latency)}; "
        f"lag {_seconds(rates.lag and rates.lag.p99)}"
    )
    return Text(f"{first}\n{second}")


def steps_text(views: Sequence[pb.ReplicaView]) -> Text:
    """Ranks, and the latest step, of each replica: what the table has no room for."""
    lines = []
    for view in views:
        step = view.steps[-1] if view.steps else None
        latest = (
            ""
            if step is None
            else f"; step {step.step}: {step.num_decode_tokens} decode, {step.num_draft_tokens} draft, "
            f"{step.num_prefill_tokens} prefill of {view.max_num_batched_tokens}, {_seconds(step.seconds)}"
        )
        ranks = ", ".join(f"rank {rank.rank} {rank.state}" for rank in view.ranks) or plain(view.description)
        lines.append(f"{view.replica_id or '?'}: {ranks}{latest}")
    return Text("\n".join(lines), "dim")


def _count(value: float) -> str:
    if value < 10_000:
        return f"{value:.0f}"
    return f"{value / 1000:.0f}k" if value < 10_000_000 else f"{value / 1e6:.0f}M"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{1000 * value:.0f}ms" if value < 1 else f"{value:.1f}s" if value < 100 else _age(value)


def _age(value: float) -> str:
    minutes, seconds = divmod(int(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds:02}s"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"


def _quantiles(values: Quantiles | None) -> str:
    return "-" if values is None else "/".join(map(_seconds, (values.p50, values.p95, values.p99)))
