"""`octavo explain`: where a request's time went."""
