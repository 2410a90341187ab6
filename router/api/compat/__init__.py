"""Other projects' gRPC services, on the router's own server, over its own intake: option `compat`."""
