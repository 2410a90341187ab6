"""Token embeddings, of a whole vocabulary or a rank's part of it: triton.py on a GPU, reference.py in plain PyTorch."""
