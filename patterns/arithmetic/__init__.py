"""Arithmetic in graphs: formulas that views are matched with, casts, constants and steps."""
