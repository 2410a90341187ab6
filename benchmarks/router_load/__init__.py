"""Drives a router in benchmarks/router_cost.py: a scheduler without a model, and clients that cost next to nothing."""
