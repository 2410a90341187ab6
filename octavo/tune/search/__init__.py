"""The search for the best setting: predicted first, then measured."""
