"""The templates of the QKV kernels."""
