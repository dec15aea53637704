"""The templates of a mixture's own kernels."""
