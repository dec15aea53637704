"""Recognisers of projected heads."""
