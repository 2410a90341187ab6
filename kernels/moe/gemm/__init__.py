"""The experts of a mixture: gated MLPs, each of them on the tokens that are routed to it."""
