"""Clusters whose processes are killed while streams run: what `benchmarks.faults.chaos`, `benchmarks.faults.soak` and
tests/faults share."""
