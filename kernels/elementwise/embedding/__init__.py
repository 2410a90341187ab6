"""Token embeddings, of a whole vocabulary or a rank's part of it: triton.py for GPUs, torch_cpu.py for CPUs."""
