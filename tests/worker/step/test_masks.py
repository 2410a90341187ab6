"""Constrained rows in whole steps, on a CPU: forced tokens change no output, and errors are those of one row."""

from collections.abc import Sequence
from typing import Any

import pytest

from protos.inference_pb2 import SamplingParams, TokenIds
from scheduler.core.messages import FinishReason, Speculation
from tests.fakes.fake_model import POISON
from tests.fakes.fake_runner import fake_runner
from tests.support.masked_rows import END, EOS, LONG, PLAIN, TEXTS, THINKING, settings
from tests.support.scheduler.generate import Asked, Generated, generate
from tests.support.text_choices import FEW_TOKENS, choice, texts_grammars
from worker.step import masks

REQUESTS = [
    Asked([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=40, constraint=TEXTS, logprobs=2), num_choices=2),
    Asked([8, 9], SamplingParams(temperature=1.5, seed=4, max_tokens=40, constraint=TEXTS), num_choices=3),
    Asked([5, 6, 7], SamplingParams(temperature=0.0, **PLAIN)),
    Asked([3] * 9, SamplingParams(temperature=1.0, seed=2, max_tokens=60, constraint=LONG, logprobs=1)),
    Asked([11], SamplingParams(temperature=1.0, seed=7, top_k=9, presence_penalty=1.0, **PLAIN)),
    # Ends within forced tokens, and at a token of its own.
    Asked([4, 4], SamplingParams(temperature=0.0, max_tokens=7, constraint=LONG)),
    Asked([4, 5], SamplingParams(temperature=0.0, max_tokens=60, constraint=LONG, stop_token_ids=[20])),
    # In the middle of its output.
    Asked([9], SamplingParams(temperature=0.0, max_tokens=40, constraint=TEXTS), output=[42, 26, 30]),
    # The end of the reasoning is forced.
    Asked([5, 6, 7], SamplingParams(temperature=0.0, logprobs=1, **THINKING, **PLAIN)),
    Asked([8, 9], SamplingParams(temperature=1.0, seed=4, **THINKING, **PLAIN), num_choices=2),
]


def run(asked: Sequence[Asked] = REQUESTS, *, steps: int = 1, lose_at: int = 0, **changes: Any) -> Generated:
    runner = fake_runner(grammars=texts_grammars(EOS, FEW_TOKENS))
    return generate(runner, settings(steps, **changes), asked, lose_at=lose_at)


@pytest.fixture(scope="module")
def expected() -> Generated:
    """Without forced tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks, "MAX_FORCED_TOKENS", 0)
        made = run()
    assert not made.stats.num_draft_tokens
    return made


def text_of(tokens: Sequence[int]) -> str:
    return b"".join(FEW_TOKENS.get(token, b"") for token in tokens).decode()


def test_outputs_are_what_their_constraints_ask_for(expected: Generated) -> None:
    for key, tokens in expected.tokens.items():
        constraint = REQUESTS[key[0] - 1].sampling.constraint
        if not constraint.WhichOneof("kind"):
            continue
        said = text_of([*REQUESTS[key[0] - 1].output, *tokens])
        if expected.ends[key].reason is FinishReason.LENGTH or key[0] == 7:
            assert any(text.startswith(said) for text in constraint.choice.texts)
        else:
            assert said in constraint.choice.texts
            assert tokens[-1] == EOS
    assert len({text_of(tokens) for key, tokens in expected.tokens.items() if key[0] == 2}) > 1


def test_a_spent_budget_ends_the_reasoning_and_changes_no_token_before_it(expected: Generated) -> None:
    greedy, free = expected.tokens[9, 0], expected.tokens[3, 0]
    assert list(greedy[:6]) == list(free[:6])
    for key in ((9, 0), (10, 0), (10, 1)):
        assert list(expected.tokens[key][6:10]) == END
        assert len(expected.tokens[key]) == 30
    assert expected.tokens[10, 0] != expected.tokens[10, 1]


# From n-grams, beside the forced tokens.
TWO_DRAFTS = Speculation(num_speculative_tokens=2, drafters=("ngram",), prompt_lookup_min=1)


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize(
    "changes", [{}, {"num_blocks": 9}, {"max_num_batched_tokens": 12}, {"speculation": TWO_DRAFTS}]
)
def test_forced_tokens_change_no_output_and_no_logprob(
    expected: Generated, steps: int, changes: dict[str, Any]
) -> None:
    """Also where blocks run out, so that sequences are computed again from their tokens."""
    made = run(steps=steps, **changes)
    assert made.texts == expected.texts
    assert made.logprobs == expected.logprobs
    stats = made.stats
    assert stats.num_accepted_tokens > 40
    # All are right; those of sequences that were preempted or ended in the same step do not count.
    if not changes:
        assert stats.num_accepted_tokens >= stats.num_draft_tokens - 2 * 16
    assert (stats.num_preemptions > 0) == ("num_blocks" in changes)
    # Neither sequences with a constraint nor others are held back.
    if not changes:
        assert made.most_in_flight[3, 0] == made.most_in_flight[1, 0] == steps


@pytest.mark.parametrize("lose_at", [2, 5, 9, 14])
def test_workers_that_are_lost_change_no_output(expected: Generated, lose_at: int) -> None:
    assert run(steps=2, lose_at=lose_at).texts == expected.texts


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("forced", [0, 16])
def test_a_row_that_fails_says_where_and_others_go_on(steps: int, forced: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind forced tokens: what came before is kept."""
    monkeypatch.setattr(masks, "MAX_FORCED_TOKENS", forced)
    greedy = {"temperature": 0.0, "max_tokens": 40, "logprobs": 1}
    asked = [
        Asked([5], SamplingParams(**greedy, constraint=choice("abcde"), bad_word_token_ids=[TokenIds(ids=[13])])),
        Asked([5], SamplingParams(**greedy, constraint=choice("z"), min_tokens=4)),
        Asked([5], SamplingParams(**greedy, logit_bias={POISON: -100.0})),
        Asked([5], SamplingParams(**greedy, constraint=choice("xy"), allowed_token_ids=[33])),
        Asked([5], SamplingParams(**greedy, constraint=choice("xy")), output=[50]),
    ]
    asked[4].sampling.constraint.regex = "x*"
    made = run(asked, steps=steps)
    (first, second, third, fourth, fifth) = made.texts
    assert (text_of(first[0]), first[1]) == ("abc", FinishReason.ERROR)
    position = len(first[0])
    why = "the constraint leaves 1, and sampling.bad_words bans them"
    assert first[2] == f"no token is left at output position {position}: {why}"
    why = "the constraint leaves 1, and sampling.min_tokens bans them"
    assert second == ([35], FinishReason.ERROR, f"no token is left at output position 1: {why}")
    assert third[1] is not FinishReason.ERROR
    assert text_of(fourth[0]) == "x"
    assert fourth[2].startswith("no token is left at output position 1")
    assert fifth == (
        [],
        FinishReason.ERROR,
        "no token is left at output position 1: regex: this engine has choices only",
    )
    assert all(len(made.logprobs[key]) == len(tokens) for key, tokens in made.tokens.items())


# Greedy rows with a constraint and without: their steps keep no logits.
GREEDY = [
    Asked([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=40, constraint=TEXTS), num_choices=2),
    Asked([8, 9], SamplingParams(temperature=0.0, max_tokens=40, constraint=LONG), output=[12]),
    Asked([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)),
    # Its logits are not finite, and the next one's constraint leaves no token after its output.
    Asked([5, POISON], SamplingParams(temperature=0.0, max_tokens=30, constraint=TEXTS)),
    Asked([5], SamplingParams(temperature=0.0, max_tokens=30, constraint=TEXTS), output=[33, 33]),
]


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("forced", [0, 16])
def test_greedy_rows_are_the_same_whether_logits_are_kept_or_not(
    steps: int, forced: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks, "MAX_FORCED_TOKENS", forced)
    alone = run(GREEDY, steps=steps)
    drawn = Asked([11], SamplingParams(temperature=1.0, seed=7, ignore_eos=True, max_tokens=60))
    together = run([*GREEDY, drawn], steps=steps)
    assert alone.texts == together.texts[:-1]
    assert (alone.stats.num_draft_tokens > 0) == bool(forced)
    poisoned, broken = alone.texts[-2:]
    assert poisoned == ([], FinishReason.ERROR, "the model's logits were not finite")
    assert broken[1] is FinishReason.ERROR
    assert broken[2].startswith("no token is left at output position 2")


def test_large_steps_propose_the_forced_tokens_that_their_masks_have_shown() -> None:
    """They do not wait for others, so the first of them comes without a draft."""
    asked = [Asked([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=40, constraint=LONG), num_choices=9)]

    def wide(num_seqs: int) -> Generated:
        runner = fake_runner(grammars=texts_grammars(EOS, FEW_TOKENS), max_num_seqs=9, num_blocks=128)
        return generate(runner, settings(max_num_seqs=num_seqs, num_blocks=128), asked)

    small, large = wide(8), wide(9)
    assert small.texts == large.texts
    assert large.stats.num_accepted_tokens == large.stats.num_draft_tokens > 200
    assert large.stats.num_accepted_tokens < small.stats.num_accepted_tokens
