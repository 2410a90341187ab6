"""Faults in the choice of tokens."""

from tests.support.kernels.faults import Fault

_TESTS = "tests/kernels/sampling/test_draw_triton.py"
_ADJUST_TESTS = "tests/kernels/sampling/test_adjust_triton.py"

FAULTS = [
    Fault(
        name="uniforms of another choice",
        path="kernels/sampling/triton_weights.py",
        old="position.to(tl.uint32), choice.to(tl.uint32), zero, zero",
        new="position.to(tl.uint32), zero, choice.to(tl.uint32), zero",
        test=f"{_TESTS}::test_uniforms_are_those_of_the_worker_bit_for_bit",
    ),
    Fault(
        name="tokens behind the vocabulary's end have weight",
        path="kernels/sampling/triton_filters.py",
        old='mask=tokens < vocabulary, other=float("-inf"))',
        new="mask=tokens < vocabulary, other=0.0)",
        test=f"{_TESTS}::test_draw_agrees_with_the_reference[1-1.0]",
    ),
    Fault(
        name="top_k forgets the tokens above its bin",
        path="kernels/sampling/triton_filters.py",
        old="goal - new_count)",
        new="goal - count_above)",
        test=f"{_TESTS}::test_equal_tokens_stay_or_go_together",
    ),
    Fault(
        name="a stale draft behind the last one counts",
        path="kernels/sampling/triton_verify.py",
        old="mask=d < num_drafts, other=-1)",
        new="mask=d <= num_drafts, other=-1)",
        test=f"{_ADJUST_TESTS}::test_drafts_count_until_the_first_that_the_draw_does_not_say",
    ),
    Fault(
        name="sequences to ban see the draft after the position",
        path="kernels/sampling/triton_adjust.py",
        old="num_drafts - back, mask=back <= num_drafts",
        new="num_drafts - back + 1, mask=back <= num_drafts",
        test=f"{_ADJUST_TESTS}::test_sequences_are_banned_where_the_output_ends_with_their_beginning",
    ),
]
