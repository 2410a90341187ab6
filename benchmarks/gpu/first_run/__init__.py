"""The parts of `benchmarks/gpu/first_run.sh`: what to run first when a GPU is at hand, each in a process of its own."""
