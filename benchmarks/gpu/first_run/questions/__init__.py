"""Questions to a GPU, each a module with `run(report, *, toy)` that times variants of one computation in turn."""
