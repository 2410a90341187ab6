"""How requests of a benchmark are sent: by Octavo's gRPC, or by OpenAI's HTTP to any server."""
