"""The state of a core as plain typed values: what `scheduler.core.snapshot` saves and restores, and recordings hold."""

import msgspec

from scheduler.core.messages import CoreSettings, CoreStats, GroupRequest, StepCosts
from scheduler.core.pacing.pace import SavedPace, StepTiming
from scheduler.core.state.items import SavedItem
from scheduler.core.state.request import Order, SequenceStatus
from scheduler.core.state.timelines import Entry


class SavedSequence(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """A live sequence; the fields are those of `Sequence`."""

    choice: int
    order: Order
    status: SequenceStatus
    output_token_ids: list[int]
    num_cached_tokens: int
    num_tokens_when_preempted: int
    # Set while the sequence runs.
    row: int
    generation: int
    last_step: int
    block_ids: list[int]
    num_computed_tokens: int
    num_published_blocks: int
    is_decoding: bool
    drafts: tuple[int, ...]
    # Set while the sequence is swapped out.
    host_blocks: list[int]
    num_swapped_tokens: int
    # Set while it decodes (`Decodes.wait`).
    waits: bool = False
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    next_item: int = 0
    holds_item: bool = False


class SavedGroup(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    # Without `sampling`.
    request: GroupRequest
    # True if the group has never run.
    is_queued: bool
    # Live sequences only.
    sequences: list[SavedSequence]
    timeline: list[Entry]
    num_timeline_entries_dropped: int


class SavedStep(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """A plan in flight; the fields are those of `StepInFlight`."""

    step: int
    generations: list[int]
    rows: list[int]
    positions: list[int]
    # Forced tokens, by generation.
    drafts: dict[int, tuple[int, ...]]
    # Generations of the sequences that have not left their rows since.
    finishing: list[int]
    is_empty: bool = False
    num_prefill_tokens: int = 0
    # Without forced ones. Empty: none has any.
    num_drafts: list[int] = []
    num_expected_drafts: float = 0.0
    timing: StepTiming | None = None


class SavedDrafting(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The knowledge of drafters besides the tokens of running sequences."""

    costs: StepCosts | None
    # By drafter and level: `Rates`.
    hits: list[list[float]]
    tries: list[list[float]]
    # (tenant, cache_salt, its recent outputs)
    recent_outputs: list[tuple[str, str, list[list[int]]]]
    output_lengths: list[int] = []
    # Expected and accepted drafts: `DraftTrust`. None: not kept.
    worth: tuple[float, float] | None = None


class SavedPool(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Free and cached blocks, in their order in the pool, and the hashes of the blocks that can be found."""

    free: list[int]
    cached: list[int]
    hashes: dict[int, bytes]


class SavedRows(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    free: list[int]
    # (last step that may name it, row)
    resting: list[tuple[int, int]]
    untold: list[int]


class SavedItems(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    items: list[SavedItem]
    num_numbers: int
    # Numbers of cached items that no sequence holds, in their order, and of those that no plan has forgotten yet.
    unheld: list[int]
    forgotten: list[int]


class SavedFaultIsolation(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The fields are those of `FaultIsolation`; by_group holds the fields of `Suspicion`."""

    by_group: dict[int, tuple[int, dict[int, int]]]
    lost: dict[int, dict[int, int]]
    is_isolating: bool
    alone: int | None


class Snapshot(msgspec.Struct, array_like=True, frozen=True, kw_only=True, tag="snapshot"):
    settings: CoreSettings
    stats: CoreStats
    step: int
    num_arrivals: int
    num_generations: int
    groups: list[SavedGroup]
    in_flight: list[SavedStep]
    pool: SavedPool
    rows: SavedRows
    free_host_blocks: list[int]
    # (block, host block) copies that no plan has contained yet.
    swapped_out: list[tuple[int, int]]
    # (generation, number of leading blocks it keeps) that no plan has contained yet.
    trimmed: list[tuple[int, int]]
    fault_isolation: SavedFaultIsolation
    # Counters of tenants, and their floor (`TenantShares`).
    shares: tuple[dict[str, float], float]
    drafting: SavedDrafting | None = None
    # None: there has been none.
    items: SavedItems | None = None
    # None: steps may take any time.
    pace: SavedPace | None = None
