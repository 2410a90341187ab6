"""How a process shows that it makes progress, and ends itself when it does not."""
