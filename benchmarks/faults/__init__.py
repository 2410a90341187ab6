"""Clusters whose processes are killed while streams run: shared by `benchmarks.faults.chaos`, `benchmarks.faults.soak`
and tests/faults."""
