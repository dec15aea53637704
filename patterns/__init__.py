"""What to look for: the dataflow types, the pattern language, one file per family."""
