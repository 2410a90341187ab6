"""Receives ZeroMQ messages of a few frames.

A message may have any number of frames, each of two bytes or more on the wire, and comes whole: a million empty ones
held a loop for 4.9 s on a busy machine. So frames beyond the first few are dropped, a few hundred a call.
"""

import zmq

# No message of ours has more, with its peer's identity.
_MOST_FRAMES = 8
_DROPPED_A_CALL = 250


class Frames:
    """Reads one socket, for one thread."""

    def __init__(self, socket: zmq.Socket) -> None:
        self._socket = socket
        self._has_rest = False

    def receive(self) -> list[bytes] | None:
        """Returns the frames of the next message, of one with too many the first nine; None if there is none yet, or
        if more of a long message is to be dropped: then the socket stays readable."""
        try:
            if self._has_rest and not self._drop():
                return None
            frames = [self._socket.recv(zmq.NOBLOCK)]
        except zmq.Again:
            return None
        while self._socket.getsockopt(zmq.RCVMORE):
            if len(frames) > _MOST_FRAMES:
                self._has_rest = True
                break
            frames.append(self._socket.recv(zmq.NOBLOCK))
        return frames

    def _drop(self) -> bool:
        """Drops frames. Returns True at the end of the message."""
        for _ in range(_DROPPED_A_CALL):
            self._socket.recv(zmq.NOBLOCK, copy=False)
            if not self._socket.getsockopt(zmq.RCVMORE):
                self._has_rest = False
                return True
        return False
