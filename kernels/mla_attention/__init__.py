"""Multi-head latent attention over a paged cache, for GPUs: `gpu.mla_attention`."""
