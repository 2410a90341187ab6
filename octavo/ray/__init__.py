"""Starts and supervises the processes of a cluster on the nodes of a Ray cluster."""
