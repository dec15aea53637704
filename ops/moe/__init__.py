"""The mixture of experts."""
