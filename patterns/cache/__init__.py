"""Recognisers of cache writes."""
