"""Choosing tokens on a GPU, for what each row asks."""
