"""The requests of a crowd's streams beyond plain texts, and the clusters that they need."""
