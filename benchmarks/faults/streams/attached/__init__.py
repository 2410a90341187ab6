"""Streams that outlive their connections, over gRPC and as server-sent events."""
