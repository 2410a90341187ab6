"""Means by which faults are made: relays, a disk that can be full, a clock that can be set, odd processes."""
