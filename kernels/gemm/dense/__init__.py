"""y = x W^T + bias of floats.

triton.py has the public function: torch's GEMM, or where a row's bits must not depend on its batch a Triton kernel;
reference.py is the formula.
"""
