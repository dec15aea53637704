"""Kernels that are compiled with every supported release of Triton, family by family."""
