"""Which experts compute each token of a mixture of experts, and how much each counts."""
