"""Events are kept in order, and no more than there is room for."""

from router.telemetry.event_log import EventLog


def test_those_after_a_number_come_in_order() -> None:
    events = EventLog()
    for i in range(5):
        events.note("ended", f"number {i}", request_id=f"r{i}")
    assert [each.text for each in events.since(3)] == ["number 3", "number 4"]
    assert events.since(5) == []
    assert events.last == 5


def test_old_ones_and_long_texts_take_no_more_room() -> None:
    events = EventLog()
    for _ in range(2000):
        events.note("replica", "x" * 10_000)
    kept = events.since(0)
    assert [kept[0].number, kept[-1].number, len(kept)] == [1489, 2000, 512]
    assert len(kept[0].text) == 400
