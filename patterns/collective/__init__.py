"""Patterns around collectives."""
