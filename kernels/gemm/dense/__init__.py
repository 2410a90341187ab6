"""y = x W^T + bias of floats.

triton.py has the public function: torch's GEMM, or a Triton kernel where a row's bits must not depend on its batch.
reference.py is the formula.
"""
