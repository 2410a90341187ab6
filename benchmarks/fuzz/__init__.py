"""Malformed messages for every edge where Octavo reads what another process has written."""
