"""Tells of requests: spans, lines in the log, and metrics."""
