"""Malformed messages for every edge at which Octavo reads what another process has written."""
