"""The kinds of faults, a module a subject."""
