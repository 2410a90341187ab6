"""The experts of a mixture: gated MLPs, each applied to the tokens that are routed to it."""
