"""What people who watch a cluster see: the console in a browser, `octavo top` in a terminal, Prometheus."""
