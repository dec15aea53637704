"""The templates of the attention kernels."""
