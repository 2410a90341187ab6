"""Random walks over all policies and modes; benchmarks/scheduler/properties.py runs longer ones."""

from collections import Counter

from tests.properties.walk import walks

NUM_STEPS = 20_000
# Events that must have happened, or the walks are too tame to prove anything.
FEATURES = [
    "a long prefill was passed",
    "a prefill was chunked",
    "a result for one that has gone",
    "an empty step",
    "an empty step that frees rows",
    "blamed",
    "bypassed the prefix cache",
    "cache events",
    "came back",
    "cancelled: preempted",
    "cancelled: running",
    "cancelled: swapped",
    "cancelled: waiting",
    "chunked prefill: False",
    "chunked prefill: True",
    "decode steps",
    "decodes beyond the budget",
    "displaced",
    "costs told",
    "drafts accepted",
    "drafts of the core's drafters",
    "drafts planned",
    "drafts wanted",
    "ended at once",
    "ended by its own stop token",
    "ended within its drafts",
    "ended: length",
    "ended: repetition",
    "ended: stop",
    "failed",
    "failed within its drafts",
    "forgotten by the workers",
    "held, then planned",
    "look-ahead blocks given back",
    "mixed steps",
    "past a deadline",
    "policy: deadline",
    "policy: fcfs",
    "policy: priority",
    "preempted",
    "preempted with a result in flight",
    "preemption rule: first_chunk",
    "preemption rule: whole_context",
    "prefix cache reset",
    "prefix hit",
    "prefix hit after a preemption",
    "prefix hit within a batch",
    "refused: invalid",
    "refused: queue_full",
    "resumed by a client",
    "several choices",
    "several plans in flight",
    "several prefills were chunked",
    "stale results",
    "suspects",
    "tenants: 3",
    "swapped in",
    "swapped out",
    "three plans in flight",
    "timelines checked",
    "too long for the new blocks",
    "waited for forced tokens",
    "workers lost",
]


def test_no_invariant_breaks_and_everything_happens():
    seen: Counter[str] = Counter()
    for each in walks(3, NUM_STEPS):
        seen += each.seen
    assert not [feature for feature in FEATURES if not seen[feature]], seen
