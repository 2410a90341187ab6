"""Ends ZeroMQ connections over tcp whose peer has vanished without closing them."""

import zmq


def end_silent_connections(socket: zmq.Socket, endpoint: str, timeout: float) -> None:
    """Makes a socket ping its peers, and close a connection that stays silent for `timeout` seconds after a ping.

    ZeroMQ's own threads ping and answer, so a busy peer answers in time. Call it before bind or connect. Without it, a
    side that has nothing to send never learns that the other one has vanished, and one that has, after 15 minutes. A
    socket file has no such connections: the kernel closes both sides.
    """
    if endpoint.startswith("tcp://"):
        milliseconds = max(1, round(timeout * 1000))
        socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, milliseconds // 4))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, milliseconds)
