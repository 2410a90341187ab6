"""Benchmarks of the router: its cost with fake schedulers and cheap clients, overload, and routing policies."""
