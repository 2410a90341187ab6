"""Batches of requests in OpenAI's format, as `octavo run-batch` and the router's /v1/batches compute them."""
