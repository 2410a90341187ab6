"""Reports requests: spans, log lines and metrics."""
