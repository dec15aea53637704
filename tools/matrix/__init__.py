"""Environments with other releases of the libraries, and the tests that run in them."""
