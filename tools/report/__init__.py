"""Renders reports for people: as text for a terminal, and as a page with drawings."""
