"""`octavo tune`: finds the options with the most throughput within a bound on latency, on a real cluster."""
