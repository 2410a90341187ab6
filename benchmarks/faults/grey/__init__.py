"""Faults that kill nothing: stopped and slow processes, broken networks, full disks, wrong clocks.
`python -m benchmarks.faults.chaos --grey` injects them while streams run; tests/faults/test_grey.py does so briefly."""
