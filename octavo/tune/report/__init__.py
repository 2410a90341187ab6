"""The results of a tuning run: a page with plots, JSON, YAML, and a profile of the best setting."""
