"""Capacity planning on paper: the scheduling core under a virtual clock, with a cost model of steps."""
