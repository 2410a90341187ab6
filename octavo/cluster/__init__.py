"""Starts and supervises the processes of a cluster on one machine."""
