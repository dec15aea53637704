"""The templates of the kernels that only mixtures of experts have."""
