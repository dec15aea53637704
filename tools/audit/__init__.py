"""The kernels that every compiler release is tried on, family by family."""
