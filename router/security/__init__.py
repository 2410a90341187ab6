"""Who may call a router, how often, and what keeps tenants apart."""
