"""Recognises arithmetic in graphs: formulas, casts, constants and single operations."""
