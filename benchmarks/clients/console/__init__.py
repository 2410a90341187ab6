"""What the console shows in a browser, and what it costs."""
