"""Drives a router in benchmarks/router/cost.py: a scheduler without a model, and clients that cost next to nothing."""
