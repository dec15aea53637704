"""Environments with other releases: which there are, and what runs in them."""
