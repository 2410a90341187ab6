"""`octavo bench`, a file for each kind of command."""
