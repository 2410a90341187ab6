"""What the streams of a crowd ask for, beyond plain texts, and the clusters that they need."""
