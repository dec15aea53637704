"""What keeps a rewrite safe: rules before it, checks after it, checks at each call."""
