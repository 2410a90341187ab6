import logging

import pytest

from configs.groups.compilation import GraphLevel
from worker.gpu.graphs import GraphSizes, graph_sizes


def _sizes(
    *sizes: int, level: GraphLevel = "FULL", eager: bool = False, max_num_seqs: int = 256, tokens: int = 2048
) -> GraphSizes:
    return graph_sizes(level, sizes, enforce_eager=eager, max_num_seqs=max_num_seqs, max_num_batched_tokens=tokens)


def test_the_usual_sizes_are_those_of_vllm() -> None:
    sizes = _sizes()
    assert sizes.pieces[:51] == (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
    assert sizes.decodes == (1, 2, 4, *range(8, 257, 8))


def test_pieces_reach_the_default_budget() -> None:
    """Python would launch a step of 600 tokens for longer than a large GPU computes it."""
    assert _sizes().pieces[51:] == (640, 768, 1024, 1280, 1536, 2048)
    assert _sizes(tokens=700).pieces[50:] == (512, 640, 700)
    assert _sizes(tokens=8192).pieces[-1] == 2048
    assert _sizes().for_pieces(600) == 640


def test_the_most_that_a_step_can_have_is_a_size() -> None:
    """Otherwise steps of 97 to 100 decodes, the busiest ones, would run without graphs."""
    sizes = _sizes(max_num_seqs=100, tokens=250)
    assert sizes.decodes[-2:] == (96, 100)
    assert sizes.pieces[-2:] == (248, 250)
    assert _sizes(max_num_seqs=1).decodes == (1,)
    assert _sizes(max_num_seqs=600).decodes[-2:] == (496, 512)


def test_a_step_of_decodes_has_no_more_rows_than_tokens() -> None:
    assert _sizes(max_num_seqs=64, tokens=16).decodes == (1, 2, 4, 8, 16)


@pytest.mark.parametrize(("level", "eager"), [("NONE", False), ("FULL", True), ("PIECEWISE", True)])
def test_no_graphs(level: GraphLevel, eager: bool) -> None:
    assert _sizes(4, level=level, eager=eager) == GraphSizes()


def test_steps_with_drafts_have_sizes_of_their_own() -> None:
    """Up to all rows with all drafts, as far as a graph's logits exist at once."""

    def drafts(*sizes: int, **most: int) -> tuple[int, ...]:
        common = {"enforce_eager": False, "max_num_seqs": 8, "max_num_batched_tokens": 2048, "most_drafts": 3}
        return graph_sizes("FULL", sizes, **(common | most)).drafts  # type: ignore[arg-type]

    assert drafts() == (2, 4, 8, 16, 24, 32)
    assert drafts(max_num_seqs=256) == (2, 4, *range(8, 257, 8))
    assert drafts(max_num_batched_tokens=20) == (2, 4, 8, 16, 20)
    assert drafts(64, 1, 8, 32) == (8, 32)
    assert drafts(most_drafts=0) == drafts(enforce_eager=True) == ()
    assert (
        graph_sizes(
            "PIECEWISE", (), enforce_eager=False, max_num_seqs=8, max_num_batched_tokens=64, most_drafts=3
        ).drafts
        == ()
    )


def test_pieces_alone() -> None:
    assert _sizes(8, 2, level="PIECEWISE") == GraphSizes(pieces=(2, 8))


def test_a_step_takes_the_next_size_or_none() -> None:
    sizes = _sizes(16, 4, 8, max_num_seqs=8)
    assert [sizes.for_decodes(rows) for rows in (1, 4, 5, 8, 9)] == [4, 4, 8, 8, None]
    assert [sizes.for_pieces(tokens) for tokens in (1, 9, 16, 17)] == [4, 16, 16, None]
    assert GraphSizes().for_decodes(1) is None


def test_sizes_that_no_step_can_have_are_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "octavo.worker"):
        sizes = _sizes(8, 4096, 9000, 2048)
    assert sizes == GraphSizes(decodes=(8,), pieces=(8, 2048))
    assert "cudagraph_capture_sizes: [4096, 9000] left out" in caplog.text
    assert "max_num_batched_tokens=2048" in caplog.text


def test_full_graphs_without_a_size_for_decodes_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "octavo.worker"):
        assert _sizes(512, max_num_seqs=64) == GraphSizes(pieces=(512,))
    assert "max_num_seqs=64" in caplog.text


def test_no_size_left_is_refused_with_what_works() -> None:
    with pytest.raises(ValueError, match=r"sizes=\[4096\]: no step has more than max_num_batched_tokens=2048"):
        _sizes(4096)
