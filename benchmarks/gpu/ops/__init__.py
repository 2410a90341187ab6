"""A benchmark an op: `run(report, *, toy)`."""
