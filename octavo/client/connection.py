"""Opens the clients' channels, with TLS and API keys."""

from pathlib import Path

import grpc
import grpc.aio

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 64 * 2**20),
    ("grpc.max_send_message_length", 64 * 2**20),
    # Detects a host that vanished silently. The router allows a ping every 10 s.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Without it, gRPC waits 60 s for the answer to a ping, whatever the line above says.
    ("grpc.http2.ping_timeout_ms", 10_000),
    # gRPC's own backoff, up to 120 s, would make calls fail long after the server is back.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


DEFAULT_TARGET = "localhost:50051"


def tls_credentials(
    ca_file: str | Path | None = None, cert_file: str | Path | None = None, key_file: str | Path | None = None
) -> grpc.ChannelCredentials:
    """Makes the `credentials` of a client from PEM files.

    ca_file: CAs to trust; None: those that gRPC trusts. cert_file, key_file: the client's own certificate and key, for
    a router that asks for them. Raises OSError, and ValueError if only one of those two is given.
    """
    if (cert_file is None) != (key_file is None):
        raise ValueError("only one of cert_file and key_file is given: give both, or neither")
    ca, key, cert = (None if path is None else Path(path).read_bytes() for path in (ca_file, key_file, cert_file))
    return grpc.ssl_channel_credentials(ca, key, cert)


def key_metadata(api_key: str) -> tuple[tuple[str, str], ...]:
    """The metadata that carries the API key; empty without a key."""
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
