"""`octavo bench sweep`: a table of settings and rates."""
