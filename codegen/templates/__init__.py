"""Kernel templates: ordinary Triton functions, one module per kernel family."""
