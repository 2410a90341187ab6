"""Measurements on real clusters, kept in a file."""
