"""A recording's files: what is on disk, who may read it, and how incomplete or damaged files are handled."""

import dataclasses
import errno
import logging
import os
import struct
from pathlib import Path
from random import Random

import msgspec
import pytest

from scheduler.core.messages import Speculation
from scheduler.recording.file import FIRST_LINE, RecordingFile, RecordingWriter, frame, recording_path
from scheduler.recording.records import RecordingError
from scheduler.recording.replay import replay
from tests.support.scheduler.recordings import record


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "run.trace"
    record(path)
    return path


def test_each_replica_has_a_file_of_its_own():
    assert recording_path("traces/run.trace", 3) == Path("traces/run.3.trace")
    assert recording_path("run", 0) == Path("run.0")


def test_only_its_owner_may_read_it(tmp_path: Path):
    before = os.umask(0)
    try:
        record(tmp_path / "run.trace", num_requests=60, max_bytes=10_000)
    finally:
        os.umask(before)
    for name in ("run.trace", "run.trace.1"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600


def test_what_a_run_before_has_left_is_kept_unless_it_is_empty(tmp_path: Path, trace: Path):
    content = trace.read_bytes()
    for _ in range(3):
        # No core began, so these files contain nothing worth keeping.
        RecordingWriter(trace, 1 << 20, 0).close()
        assert not trace.stat().st_size
        assert (tmp_path / "run.trace.1").read_bytes() == content


def test_a_trace_that_was_cut_off_anywhere_replays_up_to_there(tmp_path: Path, trace: Path):
    (whole,) = replay([trace])
    content, cut_off = trace.read_bytes(), tmp_path / "cut.trace"
    with RecordingFile(trace) as file:
        start = file.position
    most, num_torn = 0, 0
    for size in range(start, len(content), 211):
        cut_off.write_bytes(content[:size])
        (replayed,) = replay([cut_off])
        assert replayed.difference is None
        assert most <= replayed.num_plans <= whole.num_plans
        most = replayed.num_plans
        num_torn += replayed.num_torn_bytes > 0
    assert most >= whole.num_plans - 2
    assert num_torn
    cut_off.write_bytes(content[: start - 1])
    with pytest.raises(RecordingError, match="ends before its first snapshot"):
        replay([cut_off])


def test_no_changed_byte_goes_unnoticed(tmp_path: Path, trace: Path):
    content, changed = trace.read_bytes(), tmp_path / "changed.trace"
    choose = Random(0)
    positions = [*range(len(FIRST_LINE) + 20), *choose.sample(range(len(content)), 100), len(content) - 1]
    for position in positions:
        bad = bytearray(content)
        bad[position] ^= choose.randint(1, 255)
        changed.write_bytes(bad)
        with pytest.raises(RecordingError, match=r"damaged|not a trace|of format"):
            replay([changed])
    # Zeros at the end, as after a power failure.
    changed.write_bytes(content + bytes(100))
    with pytest.raises(RecordingError, match=f"the record at byte {len(content)} of {len(content) + 100} was"):
        replay([changed])


def test_where_a_trace_is_damaged_is_said_with_what_was_equal_before(tmp_path: Path, trace: Path):
    (whole,) = replay([trace])
    content = bytearray(trace.read_bytes())
    content[-1] ^= 1
    trace.write_bytes(content)
    with pytest.raises(RecordingError, match=r"the record at byte \d+ of \d+ was .* plans before it") as raised:
        replay([trace])
    assert f"the {whole.num_plans} plans" in str(raised.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty: the scheduler that made it had no workers yet"),
        (b"{}\n", "is not a trace"),
        (b"\x80\x04\x95" * 100, "is not a trace"),
        (b"octavo trace 99\n", "is a trace of format 99; this is Octavo with format 10"),
        (b"octavo trace x\n", "is not a trace"),
        (FIRST_LINE, "ends before its first snapshot"),
    ],
)
def test_what_is_not_a_trace_of_this_version_is_told_so(tmp_path: Path, content: bytes, words: str):
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(RecordingError, match=words):
        replay([path])


@pytest.mark.parametrize("version", [5, 9])
def test_an_older_trace_with_drafters_is_not_compared_by_todays_rules(tmp_path: Path, trace: Path, version: int):
    with RecordingFile(trace) as file:
        origin, snapshot = file.origin, file.snapshot
    settings = dataclasses.replace(snapshot.settings, speculation=Speculation(drafters=("suffix",)))
    path = tmp_path / "old.trace"
    begin = frame(origin) + frame(msgspec.structs.replace(snapshot, settings=settings))
    path.write_bytes(b"octavo trace %d\n" % version + begin)
    with pytest.raises(RecordingError, match=f"format {version} with speculative_config: how drafts are chosen has "):
        replay([path])


@pytest.mark.parametrize("field", ["num_blocks", "max_num_seqs", "num_swap_blocks", "block_size"])
def test_a_snapshot_cannot_have_its_reader_allocate_more_than_it_holds(tmp_path: Path, trace: Path, field: str):
    with RecordingFile(trace) as file:
        origin, snapshot = file.origin, file.snapshot
    settings = dataclasses.replace(snapshot.settings, **{field: 1 << 40})
    path = tmp_path / "huge.trace"
    path.write_bytes(FIRST_LINE + frame(origin) + frame(msgspec.structs.replace(snapshot, settings=settings)))
    with pytest.raises(RecordingError, match=f"the snapshot contradicts itself: {field}"):
        replay([path])


def test_a_file_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(RecordingError, match="nowhere can't be read: No such file"):
        replay([tmp_path / "nowhere"])


def test_a_trace_that_cannot_be_begun_is_an_error(tmp_path: Path):
    with pytest.raises(RecordingError, match=r"run\.trace can't be written \(No such file or directory\): give a file"):
        RecordingWriter(tmp_path / "nowhere" / "run.trace", 1 << 20, 0)
    (tmp_path / "folder").mkdir()
    with pytest.raises(RecordingError, match="something that is not a file has this name"):
        RecordingWriter(tmp_path / "folder", 1 << 20, 0)
    assert (tmp_path / "folder").is_dir()


def test_a_full_disk_ends_the_trace_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    write, num_written = os.write, 0

    def fill_up(fd: int, content: bytes) -> int:
        nonlocal num_written
        num_written += len(content)
        if num_written > 8_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, content)

    monkeypatch.setattr(os, "write", fill_up)
    with caplog.at_level(logging.WARNING):
        world = record(tmp_path / "run.trace", num_requests=60, max_bytes=2_000)
    assert not world.live
    (warning,) = caplog.messages
    assert "the trace ends here" in warning
    assert "No space left on device" in warning


@pytest.mark.parametrize("version", [2, 5, 6])
def test_a_trace_of_an_older_format_replays_to_the_same_plans(tmp_path: Path, trace: Path, version: int):
    """Its requests know no rule about repetitions, or no items, and its core no target of latency."""
    (whole,) = replay([trace])
    old = tmp_path / "old.trace"
    content, at, num_requests = trace.read_bytes(), len(FIRST_LINE), 0
    with old.open("wb") as file:
        file.write(b"octavo trace %d\n" % version)
        while at < len(content):
            (size,) = struct.unpack_from("<I", content, at)
            head = struct.calcsize("<IHI")
            record = msgspec.msgpack.decode(content[at + head : at + head + size])
            if record[0] == "submit" and record[2]["stop"]["repetition"] is None:
                if version == 2:
                    del record[2]["stop"]["repetition"]
                if version < 6:
                    del record[2]["items"]
                num_requests += 1
            elif record[0] == "schedule" and record[2] is not None and version < 6:
                # What the plan says of items.
                assert record[2][-3:] == [[], [], []]
                del record[2][-3:]
            elif record[0] == "snapshot":
                settings = record[1]
                assert record[-2:] == [None, None]
                del record[-1], settings["inter_token_latency_target"], settings["least_prefill_tokens"]
                if version < 6:
                    del record[-1], settings["encoder_cache_size"], settings["max_num_encoder_input_tokens"]
            file.write(frame(record))
            at += head + size
    (replayed,) = replay([old])
    assert replayed.difference is None
    assert replayed.num_plans == whole.num_plans
    assert num_requests > 3
