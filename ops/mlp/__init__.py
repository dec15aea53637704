"""Linears of dense layers, with what stands around them."""
