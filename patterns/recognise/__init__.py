"""Recognisers that several patterns share."""
