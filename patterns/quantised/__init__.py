"""Recognisers of quantised weights and activations."""
