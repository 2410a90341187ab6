"""Expands the few numbers that the host sends per step into a batch, with state of rows kept by the worker."""
