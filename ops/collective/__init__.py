"""Ops in which the ranks of a group work together."""
