"""Follows the schedulers' KV events, and passes them on as those of one cache."""
