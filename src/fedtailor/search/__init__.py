"""Parts that several search methods share."""
