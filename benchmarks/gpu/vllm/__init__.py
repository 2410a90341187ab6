"""vLLM beside Octavo on the same GPU: what a machine without a network needs of it, and its figures."""
