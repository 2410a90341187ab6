"""One benchmark for each op: `run(report, *, toy)`."""
