"""y = x W^T + bias of floats.

gpu.py has the public function: torch's GEMM, or where a row's bits must not depend on its batch the Triton kernel of
invariant.py; reference.py is the formula.
"""
