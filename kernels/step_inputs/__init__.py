"""What a worker on a GPU keeps of its rows there, and how a step's few numbers from the host become a batch."""
