"""The drafters of the core, against plain definitions of what they propose."""

from random import Random

import numpy as np
import pytest

from scheduler.core.drafting.drafting import Drafting
from scheduler.core.messages import Speculation, StepCosts
from tests.support.scheduler.core import make_settings

NUM_DRAFTS = 6
NO_SCOPE = "", ""


def drafting_of(*drafters: str, num_rows: int = 4, max_model_len: int = 400, **fields: object) -> Drafting:
    speculation = Speculation(num_speculative_tokens=NUM_DRAFTS, drafters=drafters, **fields)  # type: ignore[arg-type]
    return Drafting(make_settings(max_num_seqs=num_rows, max_model_len=max_model_len), speculation)


def begin(drafting: Drafting, row: int, tokens: list[int], *, max_drafts: int | None = None, scope=NO_SCOPE) -> None:
    drafting.begin(row, row + 1, np.array(tokens, np.int32), max_drafts=max_drafts, scope=scope)


def extend(drafting: Drafting, tokens_by_row: dict[int, list[int]]) -> None:
    rows = np.array(list(tokens_by_row), np.int64)
    counts = np.array([len(tokens) for tokens in tokens_by_row.values()])
    token_ids = np.array([token for tokens in tokens_by_row.values() for token in tokens], np.int32)
    drafting.extend(rows, rows + 1, token_ids, None if (counts == 1).all() else counts)


def proposed(drafting: Drafting, row: int) -> list[int]:
    token_ids, counts, _ = drafting.best(np.array([row]), np.array([row + 1]))
    return token_ids[0, : counts[0]].tolist()


def prompt_lookup(tokens: list[int], least: int, most: int) -> list[int]:
    """The definition: what followed the latest occurrence of the longest n-gram that ends the text. A copy that reaches
    the end of the text goes on with itself."""
    for order in range(most, least - 1, -1):
        for start in range(len(tokens) - order - 1, -1, -1):
            if len(tokens) > order and tokens[start : start + order] == tokens[-order:]:
                copied = tokens[start + order :]
                return [copied[i % len(copied)] for i in range(NUM_DRAFTS)]
    return []


@pytest.mark.parametrize(("least", "most"), [(1, 1), (2, 5), (3, 4)])
def test_n_grams_propose_what_followed_the_longest_latest_match(least: int, most: int) -> None:
    choose = Random(least)
    # So long that few contexts share a slot.
    drafting = drafting_of("ngram", max_model_len=60_000, prompt_lookup_min=least, prompt_lookup_max=most)
    texts = {row: choose.choices(range(4), k=choose.randint(1, 30)) for row in range(4)}
    for row, tokens in texts.items():
        begin(drafting, row, tokens)
    num_found = 0
    for _ in range(40):
        new = {row: choose.choices(range(4), k=choose.choice([1, 1, 3])) for row in sorted(choose.sample(range(4), 3))}
        extend(drafting, new)
        for row, tokens in new.items():
            texts[row] += tokens
        for row, tokens in texts.items():
            assert proposed(drafting, row) == prompt_lookup(tokens, least, most)
            num_found += bool(proposed(drafting, row))
    assert num_found > 40


@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
def test_proposals_follow_from_the_tokens_in_whatever_parts_they_come(drafter: str) -> None:
    tokens = [token % 7 for token in Random(1).choices(range(100), k=60)]
    at_once, in_parts = drafting_of(drafter), drafting_of(drafter)
    begin(at_once, 0, tokens)
    begin(in_parts, 0, tokens[:10])
    for token in tokens[10:]:
        extend(in_parts, {0: [token]})
    assert proposed(at_once, 0) == proposed(in_parts, 0) != []


@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
def test_proposals_after_a_rest_are_those_of_tokens_taken_one_by_one(drafter: str) -> None:
    choose = Random(3)
    awake, resting = drafting_of(drafter), drafting_of(drafter)
    free, dear = ({1: 1.0, 64: seconds} for seconds in (1.0, 64.0))
    for row in range(3):
        tokens = [token % 5 for token in choose.choices(range(100), k=20)]
        begin(awake, row, tokens)
        begin(resting, row, tokens)
    resting.costs.set(StepCosts(num_tokens=tuple(dear), seconds=tuple(dear.values())))
    assert resting.rest(3, 3)
    assert not resting.propose_any(np.arange(3))
    for _ in range(70):
        new = {
            row: [token % 5 for token in choose.choices(range(100), k=choose.choice([1, 1, 3]))]
            for row in sorted(choose.sample(range(3), 2))
        }
        extend(awake, new)
        extend(resting, new)
    # Other sequences are told once they are awake.
    assert not len(resting.unknown(np.array([1]), np.array([9])))
    resting.costs.set(StepCosts(num_tokens=tuple(free), seconds=tuple(free.values())))
    assert not resting.rest(3, 3)
    assert len(resting.unknown(np.array([1]), np.array([9]))) == 1
    if drafter == "ngram":
        assert [proposed(resting, row) for row in range(3)] == [proposed(awake, row) for row in range(3)]
    assert all(proposed(resting, row) for row in range(3))


def test_suffixes_match_longer_contexts_than_n_grams() -> None:
    tokens = [*range(10, 22), 77, 3, *range(16, 22), 88, 4, *range(10, 22)]
    by_suffix, by_ngram = drafting_of("suffix"), drafting_of("ngram")
    for drafting in (by_suffix, by_ngram):
        begin(drafting, 0, tokens)
    assert proposed(by_suffix, 0)[0] == 77
    assert proposed(by_ngram, 0)[0] == 88


def test_a_text_longer_than_the_ring_proposes_what_it_still_holds() -> None:
    drafting = drafting_of("ngram", max_model_len=60)
    width = drafting._texts.width
    begin(drafting, 0, [1, 2, 3, 4])
    for token in [*range(100, 100 + width), 1, 2]:
        extend(drafting, {0: [token]})
    assert proposed(drafting, 0) == []
    extend(drafting, {0: [*range(140, 146)]})
    assert proposed(drafting, 0)[:3] == [146, 147, 148]


def test_rows_that_are_not_known_or_want_no_drafts_get_none() -> None:
    drafting = drafting_of("ngram")
    begin(drafting, 0, [1, 2, 1, 2], max_drafts=0)
    begin(drafting, 1, [1, 2, 1, 2], max_drafts=2)
    assert proposed(drafting, 0) == []
    assert proposed(drafting, 1) == [1, 2]
    assert drafting.unknown(np.array([1, 2]), np.array([2, 3])).tolist() == [1]
    # Another sequence has taken the row.
    assert drafting.best(np.array([1]), np.array([9]))[1].tolist() == [0]


# --- Recent outputs


def test_recent_outputs_serve_their_scope_only() -> None:
    drafting = drafting_of("suffix", max_cached_outputs=3)
    output = np.arange(100, 120, dtype=np.int32)
    drafting.end_output(("tenant", "salt"), output)
    for row, scope in enumerate([("tenant", "salt"), ("tenant", ""), ("", "salt"), NO_SCOPE]):
        begin(drafting, row, [5, 103, 104, 105], scope=scope)
    assert [proposed(drafting, row) for row in range(4)] == [[106, 107, 108, 109, 110, 111], [], [], []]
    # Not past the end of an output.
    extend(drafting, {0: list(range(106, 118))})
    assert proposed(drafting, 0) == [118, 119]


def test_recent_outputs_propose_what_followed_most_often() -> None:
    drafting = drafting_of("suffix", max_cached_outputs=9)
    for number, follower in enumerate([5, 8, 5, 5, 6]):
        drafting.end_output(NO_SCOPE, np.array([50 + number, *range(60, 66), 1, 2, follower], np.int32))
    begin(drafting, 0, [1, 2])
    assert proposed(drafting, 0)[0] == 5
    # In its own text the latest counts.
    begin(drafting, 1, [1, 2, 5, 0, 1, 2, 5, 8, 1, 2, 6, 3, 1, 2])
    assert proposed(drafting, 1)[0] == 6


def test_recent_outputs_are_bounded() -> None:
    drafting = drafting_of("suffix", max_cached_outputs=2)
    for start in (100, 200, 300):
        drafting.end_output(NO_SCOPE, np.arange(start, start + 20, dtype=np.int32))
    for row, start in enumerate((100, 200, 300)):
        begin(drafting, row, [start + 3, start + 4])
    assert [bool(proposed(drafting, row)) for row in range(3)] == [False, True, True]
    # Far more than a lane holds.
    for number in range(2000):
        drafting.end_output(NO_SCOPE, np.arange(50 * number, 50 * number + 40, dtype=np.int32))
    begin(drafting, 0, [50 * 1999 + 1, 50 * 1999 + 2])
    assert proposed(drafting, 0)[0] == 50 * 1999 + 3


def test_saved_outputs_and_rates_come_back() -> None:
    drafting, again = (drafting_of("suffix", max_cached_outputs=2) for _ in range(2))
    begin(drafting, 0, [1, 2, 3, 1, 2, 3])
    extend(drafting, {0: [1, 2, 3, 1]})
    drafting.end_output(NO_SCOPE, np.arange(100, 120, dtype=np.int32))
    again.restore(*drafting.save())
    for each in (drafting, again):
        begin(each, 1, [102, 103])
    found = [each.best(np.array([1]), np.array([2])) for each in (drafting, again)]
    for one, other in zip(*found, strict=True):
        assert np.array_equal(one, other)
    assert again.save() == drafting.save()


# --- Rates


def test_rates_follow_what_turns_out_right_also_without_drafts() -> None:
    drafting = drafting_of("ngram")
    begin(drafting, 0, [1, 2, 3, 4] * 3)
    begin(drafting, 1, [1, 2, 3, 4] * 3)
    choose = Random(2)
    for step in range(60):
        # The second row is random after the same beginning.
        extend(drafting, {0: [step % 4 + 1], 1: [choose.randrange(1, 5)]})
    rates = drafting.best(np.array([0, 1]), np.array([1, 2]))[2]
    assert rates[0] > 0.9
    assert rates[1] < 0.6


def test_the_workers_drafts_are_compared_like_others() -> None:
    drafting = drafting_of("ngram", workers_draft=True)
    begin(drafting, 0, [1, 2, 3, 1, 2, 3])
    for token in Random(3).sample(range(1000), 30):
        drafting.take_workers(0, (token, 7))
        extend(drafting, {0: [token, 7, 8]})
    drafting.take_workers(0, (60, 61, 62))
    assert proposed(drafting, 0) == [60, 61, 62]
    # They hold for the next tokens only.
    extend(drafting, {0: [1]})
    assert proposed(drafting, 0)[:2] != [61, 62]


def test_rows_are_not_asked_for_drafts_without_those_that_would_share_their_cost() -> None:
    """One of two rows has a long text that the workers' drafter lacks; a draft costs as much for one row as for two."""
    speculation = Speculation(num_speculative_tokens=4, workers_draft=True, workers_catch_up=True)
    drafting = Drafting(make_settings(max_num_seqs=2, max_model_len=1000), speculation)
    rows, most, coming = np.arange(2), np.array([4, 4]), np.array([50.0, 50.0])
    for draft_seconds, position, expected in ((0.25, 5, [1, 1]), (0.25, 900, [0, 0]), (0.1, 900, [1, 0])):
        costs = {"draft_seconds": (draft_seconds,) * 2, "catch_up_seconds": 1.0}
        drafting.costs.set(StepCosts(num_tokens=(1, 16), seconds=(1.0, 1.0), **costs))  # type: ignore[arg-type]
        assert drafting.choose_wanted(rows, most, np.array([5, position]), coming).tolist() == expected
