"""What this router tells of requests: spans, lines in the log, and metrics of those that have ended."""
