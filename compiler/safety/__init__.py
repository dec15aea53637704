"""The safety of rewrites: rules before a rewrite, checks after it, and checks at each call."""
