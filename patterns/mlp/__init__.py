"""Patterns of linears of dense layers."""
