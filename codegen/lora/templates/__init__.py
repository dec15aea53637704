"""The templates of the LoRA kernels."""
