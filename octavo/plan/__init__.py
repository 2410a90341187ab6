"""Capacity on paper: the scheduling core under a virtual clock, with a model of what a step costs."""
