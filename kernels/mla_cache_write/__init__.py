"""Stores the latents and rope parts of new tokens in their slots of a cache of MLA, on GPUs: `gpu.mla_cache_write`."""
