"""What keeps a rewrite safe: before it, on the rewritten graph, and at each call."""
