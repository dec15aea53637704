"""Fused ops: schema, fake, validation, reference and lowerings, one file per op."""
