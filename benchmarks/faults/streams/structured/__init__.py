"""Constrained and tool-calling streams for benchmarks.faults.chaos, and what their outputs must be."""
