"""Patterns of mixtures of experts and their routers."""
