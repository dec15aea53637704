"""The safety of rewrites: rules before it, checks after it, checks at each call."""
