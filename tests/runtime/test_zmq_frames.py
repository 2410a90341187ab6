"""runtime.zmq_frames: messages of many frames are dropped in parts, and what comes behind them is read."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from runtime import zmq_frames
from runtime.zmq_frames import Frames

_WAIT_MS = 30_000


@pytest.fixture(name="sockets")
def _sockets(tmp_path: Path) -> Iterator[tuple[zmq.Socket, zmq.Socket]]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as reads, context.socket(zmq.DEALER) as writes:
        reads.linger = writes.linger = 0
        reads.bind(f"ipc://{tmp_path}/it")
        writes.connect(f"ipc://{tmp_path}/it")
        yield reads, writes


def test_a_message_is_read_as_it_is(sockets: tuple[zmq.Socket, zmq.Socket]) -> None:
    reads, writes = sockets
    frames = Frames(reads)
    assert frames.receive() is None
    for sent in ([b"one"], [b"", b"two", b""], [b"x"] * zmq_frames._MOST_FRAMES):
        writes.send_multipart(sent)
        assert reads.poll(_WAIT_MS)
        received = frames.receive()
        assert received is not None
        assert received[1:] == sent
    assert frames.receive() is None


@pytest.mark.parametrize("num_frames", [9, 10, 250, 251, 5000])
def test_frames_that_are_too_many_are_dropped_a_few_hundred_a_call(
    sockets: tuple[zmq.Socket, zmq.Socket], num_frames: int
) -> None:
    reads, writes = sockets
    frames = Frames(reads)
    writes.send_multipart([b""] * num_frames)
    writes.send(b"good")
    assert reads.poll(_WAIT_MS)
    first = frames.receive()
    assert first is not None
    assert len(first) == zmq_frames._MOST_FRAMES + 1
    num_calls, second = 0, None
    while second is None:
        # There is always more to read meanwhile.
        assert reads.poll(_WAIT_MS)
        second = frames.receive()
        num_calls += 1
    assert second[1:] == [b"good"]
    assert num_calls >= num_frames // zmq_frames._DROPPED_A_CALL
