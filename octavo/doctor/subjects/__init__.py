"""The subjects of `octavo doctor`: each file reads one part of the machine and yields its lines."""
