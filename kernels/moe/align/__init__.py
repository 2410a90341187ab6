"""The order of (token, expert) pairs in a grouped GEMM: by expert, in blocks of one expert each."""
