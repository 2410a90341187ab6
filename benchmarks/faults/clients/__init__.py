"""octavo-client alone, and the programs of docs/clients, against a cluster whose processes are killed."""
