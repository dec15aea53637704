"""The templates of the MLA kernels."""
