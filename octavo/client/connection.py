"""How clients connect, and say who they are."""

from pathlib import Path

import grpc
import grpc.aio

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 64 * 2**20),
    ("grpc.max_send_message_length", 64 * 2**20),
    # Finds a host that went away without a word. The router allows a ping each 10 s.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # gRPC's own backoff, up to 120 s, would make calls fail long after the server is back.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


DEFAULT_TARGET = "localhost:50051"


def tls_credentials(
    ca_file: str | Path | None = None, cert_file: str | Path | None = None, key_file: str | Path | None = None
) -> grpc.ChannelCredentials:
    """For `credentials` of a client, from PEM files.

    ca_file: CAs that the router's certificate may come from; None: those that gRPC trusts. cert_file, key_file: the
    client's own, for a router that asks for one. Raises OSError, and ValueError if only one of the two is given.
    """
    if (cert_file is None) != (key_file is None):
        raise ValueError("a client's certificate and its key go together: give cert_file and key_file, or neither")
    ca, key, cert = (None if path is None else Path(path).read_bytes() for path in (ca_file, key_file, cert_file))
    return grpc.ssl_channel_credentials(ca, key, cert)


def key_metadata(api_key: str) -> tuple[tuple[str, str], ...]:
    """What a call brings; nothing without a key."""
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


def open_channel(target: str, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
    """credentials: None for no TLS."""
    if credentials is None:
        return grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
    return grpc.secure_channel(target, credentials, options=CHANNEL_OPTIONS)


def open_async_channel(target: str, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
    """credentials: None for no TLS."""
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(target, credentials, options=CHANNEL_OPTIONS)
