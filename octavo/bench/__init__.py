"""Benchmarks that users run: the engine alone, and a running cluster as its clients see it."""
