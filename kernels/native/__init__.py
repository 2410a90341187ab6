"""Kernels in C++ for the CPU at hand: built by the system's compiler when they are first needed, and kept."""
