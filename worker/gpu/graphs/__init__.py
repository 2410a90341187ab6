"""CUDA graphs of steps, and of pieces of them."""
