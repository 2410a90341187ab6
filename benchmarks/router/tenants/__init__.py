"""Two tenants, one with ten times the other's requests: what the small one keeps of its share."""
