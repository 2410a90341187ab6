"""Stop strings are found wherever the text is cut, and no part of one is shown."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from router.text.stop_strings import StopMatcher, StopStrings


def _run(pieces: list[str], stop: list[str], *, include: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(StopStrings(stop), include_in_output=include)
    shown = ""
    for piece in pieces:
        shown += matcher.push(piece, may_stop=True)
        if matcher.matched is not None:
            return shown, matcher.matched
    return shown + matcher.finish(), None


def _expected(text: str, stop: list[str], *, include: bool) -> tuple[str, str | None]:
    """The definition: the match that ends first; of two that end together, the longer one."""
    ends = [(text.find(s) + len(s), -len(s), s) for s in stop if s in text]
    if not ends:
        return text, None
    end, _, found = min(ends)
    return text[: end if include else end - len(found)], found


small_text = st.text(alphabet="ab", max_size=30)
stops = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=3)


@given(small_text, stops, st.booleans(), st.lists(st.integers(0, 30), max_size=8))
def test_matches_the_definition_however_the_text_is_cut(
    text: str, stop: list[str], include: bool, cuts: list[int]
) -> None:
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(borders)]
    assert _run(pieces, stop, include=include) == _expected(text, stop, include=include)


def test_holds_back_no_more_than_what_may_begin_a_stop_string() -> None:
    matcher = StopMatcher(StopStrings(["END"]), include_in_output=False)
    assert matcher.push("one E", may_stop=True) == "one "
    assert matcher.push("N", may_stop=True) == ""
    assert matcher.push("x", may_stop=True) == "ENx"


def test_a_match_before_min_tokens_is_text_but_one_completed_later_counts() -> None:
    matcher = StopMatcher(StopStrings(["\n\n"]), include_in_output=False)
    assert matcher.push("a\n\nb\n", may_stop=False) == "a\n\nb"
    assert matcher.push("\nc", may_stop=True) == ""
    assert matcher.matched == "\n\n"


def test_long_repetitive_stop_strings_cost_linear_time() -> None:
    # A quadratic matcher takes minutes over this; the suite's time limit is the guard.
    matcher = StopMatcher(StopStrings(["a" * 1023 + "b"] * 16), include_in_output=False)
    assert matcher.push("a" * 200_000, may_stop=True) == "a" * (200_000 - 1023)
