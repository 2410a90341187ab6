"""`octavo top`: a live view of a running cluster, in a terminal."""
