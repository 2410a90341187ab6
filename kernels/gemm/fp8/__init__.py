"""y = x W^T of e4m3 matrices with float32 scales.

dispatch.py has the public function; choose.py decides between our Triton kernel (triton.py) and torch's scaled_mm
(scaled_mm.py); tuned_files.py finds tuned tiles for Triton; reference.py is the formula.
"""
