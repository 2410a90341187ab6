"""The order in which a grouped GEMM takes the pairs of tokens and experts: by expert, in blocks of one expert each."""
