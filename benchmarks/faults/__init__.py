"""Faults in clusters that work: processes are killed, stopped and slow, networks break, resources run out.
`python -m benchmarks.faults` injects them under several kinds of traffic; tests/faults does so briefly."""
