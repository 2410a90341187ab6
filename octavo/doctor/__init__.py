"""`octavo doctor`: checks of this machine, one file a subject, and the page that shows them."""
