"""The views of people who watch a cluster: the console in a browser, `octavo top` in a terminal, Prometheus."""
