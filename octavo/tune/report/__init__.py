"""What a tuning run leaves: a page with plots, JSON, YAML, and a profile of the best setting."""
