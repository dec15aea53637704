"""Arithmetic in graphs: formulas to match views with, casts, constants and steps."""
