"""GPU kernels measured on a GPU: `python -m benchmarks.gpu.run_all`."""
