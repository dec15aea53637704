"""Linears of dense layers, with the operations around them."""
