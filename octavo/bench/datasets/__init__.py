"""The requests of a benchmark, one file a source: drawn at random, from files of conversations, from traces."""
