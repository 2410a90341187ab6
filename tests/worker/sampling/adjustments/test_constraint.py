"""Constraints on a CPU: masks against their definition, and errors of one row."""

from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from kernels.sampling import keep_bits
from protos.inference_pb2 import Constraint, ReasoningMarks, SamplingParams, TokenIds
from tests.support.text_choices import Texts, choice, texts_grammars, tokens_of, vocabulary
from worker.sampling.sampler import Logits, Sampled, sample
from worker.sampling.state import SamplingState

VOCAB, EOS = 300, 2
WORDS = ("abcabc", "abba", "xyz", "abc")


def state_of(*rows: dict[str, Any], output: tuple[int, ...] = (), engine: bool = True) -> SamplingState:
    grammars = texts_grammars(EOS) if engine else None
    state = SamplingState(num_rows=len(rows), vocab_size=VOCAB, eos_token_ids=frozenset({EOS}), grammars=grammars)
    for row, params in enumerate(rows):
        sampling = SamplingParams(**{"temperature": 0.0, **params})
        state.set(row, sampling, 0, np.array([1], np.int64), np.array(output, np.int64))
    return state


def definition(output: list[int]) -> list[int]:
    matcher = Texts([word.encode() for word in WORDS], vocabulary(), EOS)
    assert all(matcher.take(token) for token in output)
    return sorted(matcher.allowed())


def left(state: SamplingState, row: int = 0) -> list[int]:
    logits_V = noise(1)[0]
    before_V = logits_V.copy()
    state.adjust(row, logits_V)
    there = np.flatnonzero(np.isfinite(logits_V))
    assert np.array_equal(logits_V[there], before_V[there])
    return there.tolist()


def noise(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(scale=3, size=(count, VOCAB)).astype(np.float32)


def sampled(state: SamplingState, *positions: int) -> Sampled:
    rows = np.arange(len(positions))
    return sample(Logits(logits_LV=noise(len(rows))), rows, state, rows, np.array(positions), None)


@pytest.mark.parametrize("density", [0.0, 0.01, 0.5, 1.0])
@pytest.mark.parametrize("size", [1, 31, 33, 300, 4096])
def test_bits_keep_their_tokens_and_ban_the_others(size: int, density: float) -> None:
    random = np.random.default_rng(size)
    kept = random.random(32 * -(-size // 32)) < density
    logits_V = random.normal(size=size).astype(np.float32)
    expected_V = np.where(kept[:size], logits_V, -np.inf)
    keep_bits(logits_V, np.packbits(kept, bitorder="little").view("<i4"))
    assert np.array_equal(logits_V, expected_V)


def test_masks_follow_the_output_and_do_not_depend_on_drafts_or_on_where_a_row_begins() -> None:
    random = np.random.default_rng(3)
    params = {"constraint": choice(*WORDS)}
    num_rejected = 0
    for turn in range(40):
        state, output = state_of(params), list[int]()
        row = state.constrained[0]
        while not row.is_over:
            drafts = random.choice([*tokens_of("abcxyz"), EOS, 260, 261], turn % 4).tolist()
            if (job := row.masking(drafts)) is not None:
                row.attach(state.grammars.start([job])[0])  # type: ignore[union-attr]
            going = True
            for draft in [*drafts, None]:
                allowed = definition(output)
                assert left(state) == allowed
                # A sequence that is computed again from its tokens goes on as if it had never left.
                assert left(state_of(params, output=tuple(output))) == allowed
                token = draft if draft in allowed and random.random() < 0.8 else int(random.choice(allowed))
                state.append(0, token)
                output.append(token)
                going = token == draft
                if not going or row.is_over:
                    break
            num_rejected += not going
        # Nothing is masked after the end: what is sampled there is dropped.
        assert len(left(state)) == VOCAB
    assert num_rejected > 20


def test_forced_tokens_are_those_that_masks_leave_alone() -> None:
    state = state_of({"constraint": choice(*WORDS)})
    row, found = state.constrained[0], []
    for token in tokens_of("abb"):
        state.append(0, token)
        job = row.forcing(8)
        assert job is not None
        job()
        found.append(row.forced)
    assert found == [tokens_of("b"), [], [*tokens_of("a"), EOS]]
    for token in found[-1]:
        assert left(state) == [token]
        state.append(0, token)


def test_a_job_under_way_holds_nobody_up_who_wants_the_same_masks() -> None:
    """Or no mask would be computed beside the forward pass. This would wait for ever."""
    state = state_of({"constraint": choice(*WORDS)})
    row, drafts = state.constrained[0], tokens_of("ab")
    job, under_way = row.masking(drafts), Future[None]()
    row.attach(under_way)
    assert row.masking(drafts) is row.masking(drafts[:1]) is row.masking() is None
    assert job is not None
    job()
    under_way.set_result(None)
    state.append(0, drafts[0])
    assert row.masking(drafts[1:]) is row.masking() is None
    assert left(state) == definition(drafts[:1])


def test_a_row_goes_ahead_where_one_token_is_left_and_fails_if_another_one_comes() -> None:
    state = state_of({"constraint": choice("xyz")}, {"constraint": choice("xyz")})
    for row in state.constrained.values():
        job = row.masking(most=2)
        assert job is not None
        job()
        assert row.forced == tokens_of("xy")
        state.append(0 if row is state.constrained[0] else 1, tokens_of("x")[0])
        assert row.forced == tokens_of("y")
    assert left(state, 0) == tokens_of("y")
    state.append(0, tokens_of("y")[0])
    assert left(state, 0) == tokens_of("z")
    state.append(1, tokens_of("a")[0])
    assert left(state, 1) == []
    token, why = tokens_of("a")[0], "the constraint does not allow it"
    assert state.constrained[1].error == f"the output has token {token} at position 1: {why}"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bans_that_leave_nothing_of_a_mask_fail_the_row_alone_and_say_why(temperature: float) -> None:
    drawn = {"temperature": temperature, "seed": 1, "constraint": choice(*WORDS)}
    a, x = tokens_of("ax")
    state = state_of(
        {**drawn, "allowed_token_ids": [EOS]},
        {**drawn, "bad_word_token_ids": [TokenIds(ids=[token]) for token in (a, x, 260, 261)]},
        {**drawn, "constraint": choice("a"), "min_tokens": 5},
        drawn,
        {**drawn, "constraint": Constraint()},
        {"temperature": temperature, "seed": 1, "allowed_token_ids": [8], "bad_word_token_ids": [TokenIds(ids=[8])]},
    )
    state.append(2, a)
    result = sampled(state, 0, 0, 1, 0, 0, 7)
    assert result.failed_N.tolist() == [True, True, True, False, True, True]
    assert result.why == {
        0: "no token is left at output position 0: the constraint leaves 4, and sampling.allowed_token_ids bans them",
        1: "no token is left at output position 0: the constraint leaves 4, and sampling.bad_words bans them",
        2: "no token is left at output position 1: the constraint leaves 1, and sampling.min_tokens bans them",
        4: "no token is left at output position 0: None: this engine has choices only",
        5: "no token is left at output position 7: sampling.allowed_token_ids, sampling.bad_words ban all",
    }


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite_fail_a_row_for_no_reason_of_its_constraint(
    temperature: float, value: float
) -> None:
    """Also where the mask bans them, or leaves nothing."""
    params = {"temperature": temperature, "seed": 1, "constraint": choice(*WORDS)}
    state = state_of(params, params, {**params, "constraint": Constraint()}, params)
    logits_LV = noise(4)
    logits_LV[0, tokens_of("a")[0]] = logits_LV[1, tokens_of("q")[0]] = logits_LV[2, 0] = value
    rows = np.arange(4)
    result = sample(Logits(logits_LV=logits_LV), rows, state, rows, np.zeros(4, np.int64), None)
    assert result.failed_N.tolist() == [True, True, True, False]
    assert not result.why


def test_a_matcher_that_fails_ends_its_row_where_it_fails() -> None:
    state = state_of({"constraint": choice("a" * 80)}, {"constraint": choice("b" * 80)})
    for position in range(61):
        result = sampled(state, position, position)
        assert not result.failed_N.any()
        for row, token in enumerate(result.token_ids_N.tolist()):
            state.append(row, token)
    result = sampled(state, 61)
    assert result.failed_N.tolist() == [True]
    assert result.why[0].startswith("no token is left at output position 61: the text is longer")


def test_output_that_breaks_the_constraint_and_a_worker_without_an_engine_are_errors_of_the_row() -> None:
    params = {"constraint": choice(*WORDS)}
    (said,) = sampled(state_of(params, output=(tokens_of("q")[0],)), 1).why.values()
    assert "the output has token" in said
    (said,) = sampled(state_of(params, engine=False), 0).why.values()
    assert said == "no token is left at output position 0: this worker has no grammar engine"


def thinking(budget: int, **fields: Any) -> dict[str, Any]:
    """A request whose reasoning ends with "xyz"."""
    marks = ReasoningMarks(is_open=True, ends=["xyz"], end_token_ids=tokens_of(" xyz"))
    return {"thinking_token_budget": budget, "reasoning_marks": marks, **fields}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_spent_budget_ends_the_reasoning_whatever_would_be_drawn(temperature: float) -> None:
    drawn = {"temperature": temperature, "seed": 9}
    outputs: list[list[int]] = []
    for first in range(12):
        # A sequence that is computed again goes on where it was.
        output = outputs[0][:first] if outputs else []
        state = state_of(thinking(4, **drawn), output=tuple(output))
        while len(output) < 12:
            result = sampled(state, len(output))
            assert not result.failed_N.any()
            output.append(int(result.token_ids_N[0]))
            state.append(0, output[-1])
        outputs.append(output)
    free = [int(sampled(state_of(drawn), position).token_ids_N[0]) for position in range(12)]
    assert all(output == [*free[:4], *tokens_of(" xyz"), *free[8:]] for output in outputs)


def test_a_budget_alone_masks_nothing_else_and_outlasts_an_end_that_is_ignored() -> None:
    state = state_of(thinking(2, ignore_eos=True))
    assert len(left(state)) == VOCAB
    state.append(0, EOS)
    state.append(0, EOS)
    assert left(state) == tokens_of(" ")
    ended = state_of(thinking(1))
    ended.append(0, EOS)
    assert len(left(ended)) == VOCAB


def test_a_ban_of_the_end_is_an_error_of_the_row_that_names_the_budget() -> None:
    (space,) = tokens_of(" ")
    state = state_of(thinking(0, bad_word_token_ids=[TokenIds(ids=[space])]), thinking(1, allowed_token_ids=[EOS]))
    state.append(1, space)
    result = sampled(state, 0, 1)
    assert result.why == {
        0: "no token is left at output position 0: thinking_token_budget leaves 1, and sampling.bad_words bans them",
        1: "no token is left at output position 1: thinking_token_budget leaves 1, and sampling.allowed_token_ids bans "
        "them",
    }
    # While the reasoning is free, bans alone may leave nothing.
    free = state_of(thinking(5, allowed_token_ids=[8], bad_word_token_ids=[TokenIds(ids=[8])]))
    assert sampled(free, 0).why[0].endswith(": sampling.allowed_token_ids, sampling.bad_words ban all")


def test_rows_without_a_constraint_have_no_matcher() -> None:
    state = state_of({"temperature": 1.0, "seed": 1}, {"min_tokens": 3})
    assert not state.constrained
    assert state.why_no_token(0, 0) == ""
