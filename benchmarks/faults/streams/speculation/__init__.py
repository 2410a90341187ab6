"""Streams and replicas for benchmarks.faults.chaos that draft in different ways."""
