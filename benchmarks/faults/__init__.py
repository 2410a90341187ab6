"""Clusters whose processes are killed while streams run: what `benchmarks.chaos`, `benchmarks.soak` and tests/faults
share."""
