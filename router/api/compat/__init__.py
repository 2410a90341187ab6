"""Other projects' gRPC services, on the router's own server, from its own intake: option `compat`."""
