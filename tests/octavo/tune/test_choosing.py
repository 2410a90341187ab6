"""The settings that are measured, by their predictions."""

from octavo.lab.settings import grid
from octavo.tune.search.choosing import choose
from octavo.tune.search.predictions import Prediction
from octavo.tune.search.results import Row, Status


def row(max_num_seqs: int, tok_s: float, *, ttft_ms: float = 100.0, e2e_ms: float = 1000.0) -> Row:
    numbers = {
        "output_tok_s": tok_s,
        "requests_s": 1.0,
        "ttft_ms_p50": ttft_ms,
        "ttft_ms_p99": 2 * ttft_ms,
        "itl_ms_p50": 10.0,
        "itl_ms_p99": 20.0,
        "e2e_ms_p50": e2e_ms,
    }
    [setting] = grid({"max_num_seqs": (max_num_seqs,)})
    return Row(setting=setting, prediction=Prediction(rate=1.0, numbers=numbers))


def chosen(rows: list[Row], most: int) -> list[object]:
    return [each.setting.value("max_num_seqs") for each in choose(rows, margin=0.15, most=most)]


def test_of_settings_predicted_alike_those_that_behave_differently_are_measured() -> None:
    rows = [row(16, 99.5, ttft_ms=300.0, e2e_ms=1400.0), row(64, 100.0), row(65, 100.5, e2e_ms=1010.0), row(8, 80.0)]
    assert chosen(rows, 2) == [64, 16]
    assert "differ more" in rows[2].reason
    assert rows[3].reason == "predicted 80 output tokens/s, 20% below the best"


def test_a_better_prediction_counts_more_than_another_behaviour() -> None:
    assert chosen([row(16, 90.0, ttft_ms=900.0), row(32, 95.0), row(64, 100.0)], 2) == [64, 32]


def test_settings_without_a_prediction_are_measured_and_failed_ones_are_not() -> None:
    unknown, failed = row(4, 1.0), row(8, 200.0)
    unknown.prediction, failed.status = None, Status.FAILED
    assert chosen([row(64, 100.0), unknown, failed], 1) == [4]
